"""Tool calls as bare JSON objects that make up the whole answer, as Llama 3 and 4 write them."""

from gateway.text.calls import CallObject, FunctionNames
from gateway.text.pieces import Content, Piece
from gateway.text.tags import Opening
from gateway.tool_formats.arguments import whole_call
from gateway.tool_formats.tool_format import ToolFormat

TAGS = ("<|python_tag|>", "<|python_start|><|python_end|>")
"""The tags of Llama 3 and of Llama 4 that may stand before the first call."""
_BETWEEN = " \t\r\n;,"


class Llama3Parser:
    """A text that does not start with a call is content."""

    def __init__(self, names: FunctionNames = None) -> None:
        self._names = names
        self._num_calls = 0
        self._call: CallObject | None = None
        self._opening: Opening | None = Opening(*TAGS)
        self._held: list[str] = []
        self._is_content = False

    @property
    def open_call(self) -> int | None:
        return self._call.index if self._call is not None and self._call.is_open else None

    def read(self, text: str) -> list[Piece]:
        if self._opening is not None:
            self._held.append(text)
            has_tag, text = self._opening.read(text)
            if has_tag is None:
                return []
            self._opening = None
            held = "".join(self._held)
            self._held = [held[: len(held) - len(text)]]
        pieces: list[Piece] = []
        while text:
            text = self._read_some(text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        held = "".join(self._held)
        if self._call is not None and not self._call.has_begun:
            held += self._call.raw
        return [Content(held)] if held and not self._num_calls else []

    def _read_some(self, text: str, pieces: list[Piece]) -> str:
        if self._is_content:
            pieces.append(Content(text))
            return ""
        if self._call is not None:
            return self._read_call(self._call, text, pieces)
        begun = text.lstrip(_BETWEEN if self._num_calls else None)
        self._held.append(text[: len(text) - len(begun)])
        if begun.startswith("{"):
            self._call = CallObject(self._num_calls, self._names)
        elif begun:
            self._give_back(pieces)
        return begun

    def _read_call(self, call: CallObject, text: str, pieces: list[Piece]) -> str:
        for position, char in enumerate(text):
            pieces += call.read(char)
            if call.has_begun:
                self._held.clear()
            if call.is_over:
                self._end_call(call, pieces)
                return text[position + 1 :]
        return ""

    def _end_call(self, call: CallObject, pieces: list[Piece]) -> None:
        self._call = None
        if call.has_begun:
            self._num_calls += 1
        else:
            self._held.append(call.raw)
            self._give_back(pieces)

    def _give_back(self, pieces: list[Piece]) -> None:
        self._is_content = True
        held = "".join(self._held)
        self._held.clear()
        if held := held if not self._num_calls else held.lstrip(_BETWEEN):
            pieces.append(Content(held))


FORMAT = ToolFormat(
    parser=Llama3Parser,
    inside="call",
    calls={"call": "ARGUMENTS"},
    between='"; "',
    arguments=whole_call("parameters"),  # the format of an answer may be an object, too
)
