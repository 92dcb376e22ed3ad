"""The parts that the formats of tool calls share, and a call as a JSON object with a name and
arguments."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from typing import TypeAlias

from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.text.tags import Until

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_SPACE = " \t\r\n"
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


FunctionNames: TypeAlias = Collection[str] | None
"""The names of the functions that may be called; None: any."""


def is_declared(name: str | None, names: FunctionNames) -> bool:
    return bool(name) and (names is None or name in names)


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which a model may have escaped in JSON."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def json_of(text: str) -> str:
    """The JSON that ``text`` is, or means in Python, or else ``text`` as a string."""
    text = text.strip()
    for reading in (text, {"True": "true", "False": "false", "None": "null"}.get(text, "")):
        with suppress(ValueError, RecursionError):
            json.loads(reading, parse_constant=_refuse_constant)
            return reading
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


class Outside:
    """The text around calls: content up to the next tag, without whitespace next to calls."""

    def __init__(self, *tags: str) -> None:
        self.follows_call = False
        self._until = Until(*tags)

    def read(self, text: str, pieces: list[Piece]) -> tuple[str | None, str]:
        """Adds the certain content to ``pieces``. Returns the tag with its whitespace if a tag was
        found, and the text after it."""
        content, tag, rest = self._until.read(text)
        content = content.lstrip() if self.follows_call else content
        if content:
            self.follows_call = False
            pieces.append(Content(content))
        return tag, rest

    def end(self) -> list[Piece]:
        held = self._until.end()
        is_dropped = not held or (self.follows_call and held.isspace())
        return [] if is_dropped else [Content(held)]


class JsonValue:
    """Finds the end of a JSON value. Its content is not validated: the model wrote it."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def read(self, char: str) -> bool:
        """Read the next character. Returns False if it is after the value."""
        if self._in_string:
            self._read_string(char)
        elif self._is_scalar:
            if char in ",]}" or char in _SPACE:
                self.is_complete = True
                return False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0
        elif not self._depth:
            self._is_scalar = True
        return True

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_complete = not self._depth


class CallObject:
    """Parses an object ``{"name": ..., "arguments": {...}}``, character by character.

    The call starts once its name is known and its arguments start. Until then the text may turn out
    not to be a call, in which case it is returned as content. An object whose name is not in
    ``names`` is not a call.
    """

    def __init__(self, index: int, names: FunctionNames) -> None:
        self.index = index
        self._names = names
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False
        self._raw: list[str] = []
        self._name: str | None = None
        self._key = ""
        self._text: list[str] = []
        """The value that is being read."""
        self._value: JsonValue | None = None
        self._arguments: str | None = None
        self._expected = "{"

    @property
    def raw(self) -> str:
        """Its text up to its beginning, or all of it if it has not begun."""
        return "".join(self._raw)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.is_broken

    @property
    def is_open(self) -> bool:
        """Whether its arguments have started but not ended."""
        return self.has_begun and not self.is_complete and self._arguments is None

    def read(self, char: str) -> list[Piece]:
        """Read the next character of an unfinished object."""
        if not self.has_begun:
            self._raw.append(char)
        if self._value is not None:
            return self._read_value(char)
        if char in _SPACE:
            return []
        return self._read_structure(char)

    def _read_structure(self, char: str) -> list[Piece]:
        if self._expected == "value":
            return self._begin_value(char)
        if char not in self._expected:
            self.is_broken = True
        elif char == "}":
            return self._complete()
        elif char == '"':
            self._value, self._text, self._key = JsonValue(), [char], ""
            self._value.read(char)
        else:
            self._expected = {"{": '"}', ":": "value", ",": '"'}[char]
        return []

    def _begin_value(self, char: str) -> list[Piece]:
        self._value, self._text = JsonValue(), []
        begun: list[Piece] = []
        if self._key in _ARGUMENTS and char == "{" and self._name is not None:
            begun = self._begin()
        return begun + self._read_value(char)

    def _read_value(self, char: str) -> list[Piece]:
        assert self._value is not None
        if not self._value.read(char):
            self._end_value()
            return self._read_structure(char) if char not in _SPACE else []
        streamed: list[Piece] = []
        if self.is_open:  # passed on, so that it need not be kept
            streamed.append(CallArguments(self.index, char))
        else:
            self._text.append(char)
        if self._value.is_complete:
            self._end_value()
        return streamed

    def _end_value(self) -> None:
        self._value, text = None, "".join(self._text)
        if not self._key:
            self._key = _string(text) or ""
            self._expected = ":"
            self.is_broken = self._key not in _KEYS
            return
        self._expected = ",}"
        if self._key == "name":
            self._name = _string(text)
            self.is_broken = not is_declared(self._name, self._names)
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = text

    def _begin(self) -> list[Piece]:
        if self.has_begun or self._name is None:
            return []
        self.has_begun = True
        return [CallStart(self.index, self._name)]

    def _complete(self) -> list[Piece]:
        if self.has_begun:
            self.is_complete = True
            return []
        if self._name is None:
            self.is_broken = True
            return []
        self.is_complete = True
        return [*self._begin(), CallArguments(self.index, _arguments(self._arguments))]


def _arguments(text: str | None) -> str:
    """Normalize arguments: some models omit them, or write them as a string that contains JSON."""
    if text is None or text == "null":
        return "{}"
    return _string(text) or text


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return encodable(value) if isinstance(value, str) else None
