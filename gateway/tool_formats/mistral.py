"""Tool calls after ``[TOOL_CALLS]``: a list of objects, or ``name[ARGS]{...}`` for newer models, of
which some write ``[CALL_ID]`` and an id before ``[ARGS]``."""

from functools import partial

from gateway.text.calls import CallObject, FunctionNames, JsonValue, is_declared
from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.text.tags import Until
from gateway.tool_formats.rules import entries
from gateway.tool_formats.tool_format import OBJECT_CALL, ToolFormat

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_BETWEEN = " \t\r\n,"


class MistralParser:
    """Text that is not a call remains content."""

    def __init__(self, names: FunctionNames = None, *, is_open: bool = False) -> None:
        """``is_open``: the text starts after the tag."""
        self._names = names
        self._num_calls = 0
        self._outside = Until(TAG)
        self._follows_call = False
        self._inside: _Calls | None = _Calls(0, "", names) if is_open else None

    @property
    def open_call(self) -> int | None:
        return self._inside.open_call if self._inside is not None else None

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._read_some(text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        if self._inside is not None:
            return self._inside.end()
        held = self._outside.end()
        return [Content(held)] if held and not (self._num_calls and held.isspace()) else []

    def _read_some(self, text: str, pieces: list[Piece]) -> str:
        if self._inside is None:
            sure, tag, rest = self._outside.read(text)
            sure = sure.lstrip() if self._follows_call else sure
            if sure:
                pieces.append(Content(sure))
                self._follows_call = False
            if tag is not None:
                self._inside = _Calls(self._num_calls, tag, self._names)
            return rest
        for position, char in enumerate(text):
            pieces += self._inside.read(char)
            self._num_calls = self._inside.num_calls
            if self._inside.is_over:
                self._follows_call, self._inside = self._num_calls > 0, None
                return text[position + 1 :]
        return ""


class _Calls:
    """Parses the text after a tag, character by character."""

    def __init__(self, num_calls: int, tag: str, names: FunctionNames) -> None:
        self._names = names
        self.num_calls = num_calls
        self.is_over = False
        self._first = num_calls
        self._held = [tag]
        self._in_list = False
        self._call: CallObject | None = None
        self._named: _NamedCall | None = None

    @property
    def open_call(self) -> int | None:
        call = self._call or self._named
        return call.index if call is not None and call.is_open else None

    def read(self, char: str) -> list[Piece]:
        if self._call is not None:
            return self._read_object(self._call, char)
        if self._named is not None:
            return self._read_named(self._named, char)
        if char in _BETWEEN:
            self._held.append(char)
            return []
        if char == "{":
            self._call = CallObject(self.num_calls, self._names)
            return self._read_object(self._call, char)
        if char == "[" and not self._in_list:
            self._in_list = True
            self._held.append(char)
            return []
        if char == "]" and self._in_list and self.num_calls > self._first:
            self.is_over = True
            return []
        if not self._in_list and (char.isalnum() or char in "_-."):
            self._named = _NamedCall(self.num_calls, self._names)
            return self._read_named(self._named, char)
        return self._give_back(char)

    def end(self) -> list[Piece]:
        """The held-back text, unless it consists of calls only."""
        call = self._call or self._named
        if self.num_calls or (call is not None and call.has_begun):
            return []
        held = "".join(self._held) + (call.raw if call is not None else "")
        return [Content(held)] if held else []

    def _read_object(self, call: CallObject, char: str) -> list[Piece]:
        pieces = call.read(char)
        if call.has_begun:
            self._held.clear()
        if call.is_over:
            self._call = None
            if not call.has_begun:
                return self._give_back(call.raw)
            self.num_calls += 1
            self.is_over = not self._in_list
        return pieces

    def _read_named(self, call: "_NamedCall", char: str) -> list[Piece]:
        pieces = call.read(char)
        if call.has_begun:
            self._held.clear()
        if call.is_broken:
            return self._give_back(call.raw)
        if call.is_complete:
            self.num_calls += 1
            self.is_over = True
        return pieces

    def _give_back(self, text: str) -> list[Piece]:
        self.is_over = True
        held = "".join(self._held)
        self._held.clear()
        return [Content(held + text)]


class _NamedCall:
    """A call of the form ``name[ARGS]{...}`` or ``name{...}``."""

    def __init__(self, index: int, names: FunctionNames) -> None:
        self.index = index
        self._names = names
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False
        self.raw = ""
        self._value: JsonValue | None = None

    @property
    def is_open(self) -> bool:
        return self.has_begun and not self.is_complete

    def read(self, char: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._value is None:
            self.raw += char
            self.is_broken = len(self.raw) > 512 or (char in "\n<>()")
            if char != "{":
                return []
            name = self.raw[:-1].partition(CALL_ID)[0].strip().removesuffix(ARGS).strip()
            if not is_declared(name, self._names):
                self.is_broken = True
                return []
            self._value, self.has_begun = JsonValue(), True
            pieces.append(CallStart(self.index, name))
        self._value.read(char)
        self.is_complete = self._value.is_complete
        return [*pieces, CallArguments(self.index, char)]


FORMAT = ToolFormat(
    parser=MistralParser,
    tag=TAG,
    inside='"[" call MORE "]" | named',
    calls={
        **OBJECT_CALL,
        # Newer models write no list.
        "named": '"NAME" (entry_id /[A-Za-z0-9]+/)? entry_arguments? ARGUMENTS',
    },
    more='", " call',
    between="",
    entries=entries(id=CALL_ID, arguments=ARGS),
    untagged_parser=partial(MistralParser, is_open=True),
    has_other_tokens=True,  # those of a thought
    num_id_chars=9,
)
