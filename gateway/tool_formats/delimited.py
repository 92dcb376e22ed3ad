"""Tool calls as a name and JSON arguments between special tokens, as DeepSeek V3 and Kimi K2 write
them."""

import re
from functools import partial
from typing import NamedTuple

from gateway.text.calls import FunctionNames, JsonValue, Outside, is_declared
from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.text.tags import Until
from gateway.tool_formats.rules import entries
from gateway.tool_formats.tool_format import ToolFormat

_MAX_HEADER_CHARS = 512


class Delimiters(NamedTuple):
    """The special tokens of a family."""

    section: str
    """Before all calls."""
    call: str
    """Before each call."""
    header: "re.Pattern[str]"
    """Between ``call`` and the arguments; its group is the name."""
    section_end: str


_DEEPSEEK_V3 = Delimiters(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    # V3 and R1 write the type and a code block, V3.1 only the name.
    re.compile(r"\s*(?:function<｜tool▁sep｜>([\w.-]+)\s*```json\s*|([\w.-]+)<｜tool▁sep｜>\s*)"),
    "<｜tool▁calls▁end｜>",
)
_KIMI_K2 = Delimiters(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"),
    "<|tool_calls_section_end|>",
)


class DelimitedParser:
    """Text that is not a call remains content."""

    def __init__(self, delimiters: Delimiters, names: FunctionNames = None) -> None:
        self._delimiters = delimiters
        self._names = names
        self._num_calls = 0
        self._outside = Outside(delimiters.section)
        self._section: Until | None = None
        """Finds the next call, or the end of the section."""
        self._call: _DelimitedCall | None = None
        self._held: list[str] = []
        """The text of the section, as long as it has no call."""

    @property
    def open_call(self) -> int | None:
        call = self._call
        return call.index if call is not None and call.has_begun else None

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text, pieces)
            elif self._section is not None:
                text = self._read_section(self._section, text, pieces)
            else:
                text = self._read_content(text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        if self._section is None:
            return self._outside.end()
        if self._outside.follows_call or (self._call is not None and self._call.has_begun):
            return []
        self._held.append(self._call.raw if self._call else self._section.end())
        return [Content("".join(self._held))]

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        tag, rest = self._outside.read(text, pieces)
        if tag is not None:
            self._section = Until(self._delimiters.call, self._delimiters.section_end)
            self._held, self._outside.follows_call = [tag], False
        return rest

    def _read_section(self, section: Until, text: str, pieces: list[Piece]) -> str:
        sure, tag, rest = section.read(text)
        self._held.append(sure + (tag or ""))
        if tag is None:
            return rest
        if tag.endswith(self._delimiters.call):
            self._call = _DelimitedCall(self._num_calls, self._delimiters.header, self._names)
        else:
            self._leave(pieces)
        return rest

    def _read_call(self, call: "_DelimitedCall", text: str, pieces: list[Piece]) -> str:
        for position, char in enumerate(text):
            pieces += call.read(char)
            if call.is_complete:
                self._call, self._outside.follows_call = None, True
                self._num_calls += 1
                return text[position + 1 :]
            if call.is_broken:
                self._call = None
                self._held.append(call.raw)
                self._leave(pieces)
                return text[position + 1 :]
        return ""

    def _leave(self, pieces: list[Piece]) -> None:
        """Leave the section; without a call it is content."""
        self._section = None
        if not self._outside.follows_call:
            pieces.append(Content("".join(self._held)))


class _DelimitedCall:
    """A call, from its header on."""

    def __init__(self, index: int, header: "re.Pattern[str]", names: FunctionNames) -> None:
        self.index = index
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False
        self.raw = ""
        """The header."""
        self._header = header
        self._names = names
        self._value: JsonValue | None = None

    def read(self, char: str) -> list[Piece]:
        if self._value is None:
            return self._read_header(char)
        self._value.read(char)
        self.is_complete = self._value.is_complete
        return [CallArguments(self.index, char)]

    def _read_header(self, char: str) -> list[Piece]:
        if char != "{":
            self.raw += char
            self.is_broken = len(self.raw) > _MAX_HEADER_CHARS
            return []
        match = self._header.fullmatch(self.raw)
        name = next(filter(None, match.groups()), None) if match else None
        if name is None or not is_declared(name, self._names):
            self.raw += char
            self.is_broken = True
            return []
        self._value, self.has_begun = JsonValue(), True
        return [CallStart(self.index, name), *self.read(char)]


def _kimi_id(name: str, number: int) -> str:
    """The id of the ``number``-th call of a conversation, from 0. Kimi's chat template writes only
    the ids of earlier calls and of their results, so that these have to name the function."""
    return f"functions.{name}:{number}"


DEEPSEEK_V3 = ToolFormat(
    parser=partial(DelimitedParser, _DEEPSEEK_V3),
    tag=_DEEPSEEK_V3.section,
    inside="one MORE blank? entry_close",
    calls={
        # V3 and R1 write the type and a code block, V3.1 only the name.
        "call": '"function" entry_sep "NAME\\n```json\\n" ARGUMENTS "\\n```"'
        ' | "NAME" entry_sep ARGUMENTS'
    },
    more="blank? one",
    entries={
        **entries(
            begin=_DEEPSEEK_V3.call,
            sep="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            close=_DEEPSEEK_V3.section_end,
        ),
        "one": "entry_begin call entry_end",
    },
)
KIMI_K2 = ToolFormat(
    parser=partial(DelimitedParser, _KIMI_K2),
    tag=_KIMI_K2.section,
    inside="one MORE entry_close",
    calls={"call": '"functions.NAME:" /[0-9]+/ entry_arguments ARGUMENTS'},
    more="one",
    entries={
        **entries(
            begin=_KIMI_K2.call,
            arguments="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            close=_KIMI_K2.section_end,
        ),
        "one": "entry_begin call entry_end",
    },
    numbered_id=_kimi_id,
)
