"""Tool calls whose parameters stand between tags, as Qwen3-Coder and GLM-4.5 write them.

A value is text or JSON, depending on the schema of the function: `FunctionNames` has the parameters
that are text.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from gateway.text.calls import FunctionNames, is_declared, json_of
from gateway.text.enclosed import EnclosedParser
from gateway.text.pieces import CallArguments, CallStart, Piece
from gateway.text.tags import Until
from gateway.tool_formats.arguments import TaggedArguments
from gateway.tool_formats.rules import entries
from gateway.tool_formats.tool_format import ToolFormat

_MAX_KEY_CHARS = 1024
"""A parameter whose name is longer is none: the rest of its call means nothing."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Tags(NamedTuple):
    """The tags of a family, inside of ``<tool_call>``."""

    name: "re.Pattern[str]"
    """All that precedes the first parameter, or the end; its group is the name."""
    key: str
    """Before the name of a parameter."""
    value: "re.Pattern[str]"
    """After the name of a parameter, which is its group."""
    value_begin: str
    """The end of the text that matches ``value``."""
    value_end: str
    is_padded: bool
    """Whether a value has a line of its own."""


_QWEN3_CODER = Tags(
    re.compile(r"\s*<function=([^<>\s]+)>\s*(?:</function>\s*)?"),
    "<parameter=",
    re.compile(r"([^<>\n]+)>"),
    ">",
    "</parameter>",
    is_padded=True,
)
_GLM45 = Tags(
    re.compile(r"\s*([\w.-]+)\s*"),
    "<arg_key>",
    re.compile(r"(.+?)</arg_key>\s*<arg_value>", re.DOTALL),
    "<arg_value>",
    "</arg_value>",
    is_padded=False,
)


def _tagged(tags: Tags, names: FunctionNames) -> EnclosedParser:
    return EnclosedParser(OPEN, lambda index: _TaggedCall(index, tags, names))


class _TaggedCall:
    """A call, after its opening tag.

    The text before the first parameter is held until it names a declared function. After that, text
    is written as JSON while it comes, and other values once they are complete.
    """

    def __init__(self, index: int, tags: Tags, names: FunctionNames) -> None:
        self.index = index
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False
        self._raw: list[str] = []
        """The text before the first parameter."""
        self._is_lost = False
        """Whether the rest of the answer means nothing."""
        self._tags = tags
        self._names = names
        self._texts: Collection[str] | None = None
        """The parameters that are text; None: all."""
        self._next = Until(tags.key, CLOSE)
        """Finds the next parameter or the end of the call."""
        self._key: str | None = None
        """The start of a parameter, up to its value."""
        self._value: _Value | None = None
        self._num_values = 0

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if self._is_lost:
            return [], ""
        while text and not (self.is_complete or self.is_broken):
            if self._key is not None:
                text = self._read_key(self._key, text, pieces)
            elif self._value is not None:
                written, text = self._value.read(text)
                pieces += [CallArguments(self.index, written)] if written else []
                self._value = None if self._value.is_complete else self._value
            else:
                text = self._read_between(text, pieces)
        return pieces, text

    def end(self) -> str:
        self._raw.append(self._next.end())
        return self.raw

    def _read_between(self, text: str, pieces: list[Piece]) -> str:
        sure, tag, rest = self._next.read(text)
        if not self.has_begun:
            self._raw.append(sure + (tag or ""))
            if tag is not None:
                self._begin(self.raw.removesuffix(CLOSE).removesuffix(self._tags.key), pieces)
            if not self.has_begun:
                return rest
        if tag is not None and tag.endswith(self._tags.key):
            self._key = ""
        elif tag is not None:
            self.is_complete = True
            pieces.append(CallArguments(self.index, "}" if self._num_values else "{}"))
        return rest

    def _begin(self, head: str, pieces: list[Piece]) -> None:
        match = self._tags.name.fullmatch(head)
        if match is None or not is_declared(match[1], self._names):
            self.is_broken = True
            return
        self.has_begun = True
        self._texts = self._names[match[1]] if isinstance(self._names, Mapping) else None
        pieces.append(CallStart(self.index, match[1]))

    def _read_key(self, held: str, text: str, pieces: list[Piece]) -> str:
        begin = self._tags.value_begin
        text, num_searched = held + text, max(0, len(held) - len(begin))
        match = self._tags.value.match(text) if begin in text[num_searched:] else None
        if match is None or match.end() > _MAX_KEY_CHARS:
            self._key, self._is_lost = text, len(text) > _MAX_KEY_CHARS
            return ""
        key = match[1].strip()
        is_text = self._texts is None or key in self._texts
        start = f"{', ' if self._num_values else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._key, self._value = None, _Value(self._tags, start, is_text=is_text)
        self._num_values += 1
        return text[match.end() :]


class _Value:
    """A parameter, after its name."""

    def __init__(self, tags: Tags, start: str, *, is_text: bool) -> None:
        self.is_complete = False
        self._tags = tags
        self._start = start
        """The JSON before the value."""
        self._is_text = is_text
        self._until = Until(tags.value_end)
        self._held: list[str] = []
        self._has_begun = False

    def read(self, text: str) -> tuple[str, str]:
        """Returns the JSON that is certain, and the text after the value if it has ended."""
        sure, tag, rest = self._until.read(text)
        self._held.append(sure)
        if tag is not None:
            self.is_complete = True
            self._held.append(tag.removesuffix(self._tags.value_end))
        if not self._is_text:
            return (self._start + json_of(self._taken()) if self.is_complete else ""), rest
        return self._written(self._taken()), rest

    def _taken(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    def _written(self, text: str) -> str:
        if not text and not self.is_complete:
            return ""
        written = ""
        if not self._has_begun:
            self._has_begun = True
            written = f'{self._start}"'
            if self._tags.is_padded:
                text = text.removeprefix("\n")
        if self.is_complete and self._tags.is_padded:
            text = text.removesuffix("\n")
        written += json.dumps(text, ensure_ascii=False)[1:-1]
        return f'{written}"' if self.is_complete else written


GLM45 = ToolFormat(
    parser=partial(_tagged, _GLM45),
    tag=OPEN,
    inside="blank? call",
    calls={"call": '"NAME" blank? ARGUMENTS entry_end'},
    between='"\\n"',
    entries=entries(end=CLOSE),
    arguments=TaggedArguments(
        "entry_key",
        "key_end",
        _GLM45.value_end,
        {
            **entries(key=_GLM45.key, key_close="</arg_key>", value=_GLM45.value_begin),
            "key_end": "entry_key_close blank? entry_value",
        },
    ),
    has_text_parameters=True,
)
QWEN3_CODER = ToolFormat(
    parser=partial(_tagged, _QWEN3_CODER),
    tag=OPEN,
    inside="blank? call",
    calls={"call": '"<function=NAME>" blank? ARGUMENTS entry_function_end blank? entry_end'},
    between='"\\n"',
    entries=entries(function_end="</function>", end=CLOSE),
    arguments=TaggedArguments('"<parameter="', '">"', _QWEN3_CODER.value_end),
    has_text_parameters=True,
)
