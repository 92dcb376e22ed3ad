"""Tool calls between ``<tool_call>`` and ``</tool_call>``, as Hermes and Qwen models write them."""

from gateway.text.calls import CallObject, FunctionNames
from gateway.text.pieces import Content, Piece
from gateway.text.tags import Until
from gateway.tool_formats.rules import entries
from gateway.tool_formats.tool_format import OBJECT_CALL, ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text that is not a call remains content, including tags."""

    def __init__(self, names: FunctionNames = None) -> None:
        self._names = names
        self._num_calls = 0
        self._call: CallObject | None = None
        self._outside = Until(OPEN)
        self._after = Until(CLOSE, OPEN)
        self._follows_call = False
        self._tag = OPEN

    @property
    def open_call(self) -> int | None:
        return self._call.index if self._call is not None and self._call.is_open else None

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                text = self._read_content(text, pieces)
            elif self._call.is_over:
                text = self._read_after(text)
            else:
                text = self._read_call(self._call, text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        if self._call is not None:
            is_call = self._call.has_begun or self._call.is_complete
            return [] if is_call else [Content(self._tag + self._call.raw)]
        held = self._outside.end()
        return [Content(held)] if held and not (self._num_calls and held.isspace()) else []

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        sure, tag, rest = self._outside.read(text)
        if self._follows_call:
            sure = sure.lstrip()
        if sure:
            pieces.append(Content(sure))
            self._follows_call = False
        if tag is not None:
            self._tag, self._call = tag, self._new_call()
        return rest

    def _new_call(self) -> CallObject:
        return CallObject(self._num_calls, self._names)

    def _read_call(self, call: CallObject, text: str, pieces: list[Piece]) -> str:
        for position, char in enumerate(text):
            pieces += call.read(char)
            if call.is_over:
                text = text[position + 1 :]
                break
        else:
            return ""
        if call.has_begun:
            self._num_calls += 1
            self._after = Until(CLOSE, OPEN)
        else:
            pieces.append(Content(self._tag + call.raw))
            self._call = None
        return text

    def _read_after(self, text: str) -> str:
        _, tag, rest = self._after.read(text)
        if tag is not None:
            self._follows_call = True
            is_closed = tag.endswith(CLOSE)
            self._tag, self._call = tag, None if is_closed else self._new_call()
        return rest


FORMAT = ToolFormat(
    parser=HermesParser,
    tag=OPEN,
    inside="blank? call blank? entry_end",
    calls=OBJECT_CALL,
    between='"\\n"',
    entries=entries(end=CLOSE),
    has_special_tokens=False,
)
