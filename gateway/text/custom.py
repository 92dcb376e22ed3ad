"""The inputs of custom tools, which models call as functions with a single string argument."""

import json
import re
from collections.abc import Collection, Iterable

from gateway.text.calls import encodable
from gateway.text.pieces import CallArguments, CallInput, CallStart, Piece

_INPUT = "input"
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_HEAD_CHARS = 256
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")
_ESCAPE_CHARS, _PAIR_CHARS = 6, 12


class CustomInputs:
    """Turns the JSON arguments of the calls of ``names`` into texts, piece by piece."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = 0
        self._input: _Input | None = None

    def read(self, pieces: Iterable[Piece]) -> list[Piece]:
        read: list[Piece] = []
        for piece in pieces:
            match piece:
                case CallArguments(_, text) if self._input is not None:
                    read += self._said(self._input.read(text))
                case CallStart(index, name) if name in self._names:
                    read += [*self.end(), CallStart(index, name, is_custom=True)]
                    self._index, self._input = index, _Input()
                case _:
                    read += [*self.end(), piece]
        return read

    def end(self) -> list[Piece]:
        """End the open call; returns the pieces that were held back."""
        if self._input is None:
            return []
        rest, self._input = self._input.end(), None
        return self._said(rest)

    def _said(self, text: str) -> list[Piece]:
        return [CallInput(self._index, text)] if text else []


class _Input:
    """The text of a call.

    It is read while it comes if the arguments begin with it, as they do if a grammar binds them,
    and otherwise once they are complete.
    """

    def __init__(self) -> None:
        self._held = ""
        self._all: list[str] = []
        """All that was read, as long as the input has not begun."""
        self._has_begun = False
        self._is_over = False

    def read(self, text: str) -> str:
        if self._is_over:
            return ""
        if self._has_begun:
            self._held += text
        else:
            self._all.append(text)
            if len(self._held) >= _MAX_HEAD_CHARS:
                return ""
            self._held += text
            head = _HEAD.match(self._held[:_MAX_HEAD_CHARS])
            if head is None:
                return ""
            self._has_begun, self._held = True, self._held[head.end() :]
            self._all.clear()
        return self._unescaped()

    def end(self) -> str:
        return "" if self._has_begun else _input_of("".join(self._all))

    def _unescaped(self) -> str:
        """The certain part of the string. The rest stays held."""
        texts: list[str] = []
        position = 0
        while position < len(self._held):
            char = self._held[position]
            if char == '"':
                self._is_over = True
                break
            num_chars = (
                1 if char != "\\" else _escape_chars(self._held[position : position + _PAIR_CHARS])
            )
            if not num_chars:
                break
            texts.append(_text_of(self._held[position : position + num_chars]))
            position += num_chars
        self._held = self._held[position:]
        return "".join(texts)


def _escape_chars(text: str) -> int:
    """The length of the escape sequence at the start of ``text``; 0 if it is not complete."""
    if text[1:2] != "u":
        return 2 if len(text) > 1 else 0
    if len(text) < _ESCAPE_CHARS:
        return 0
    if _HIGH_SURROGATE.match(text):
        following = text[_ESCAPE_CHARS : _ESCAPE_CHARS + 2]
        if following == "\\u":
            return _PAIR_CHARS if len(text) >= _PAIR_CHARS else 0
        if "\\u".startswith(following):
            return 0
    return _ESCAPE_CHARS


def _text_of(written: str) -> str:
    """The text that a part of a JSON string stands for; an invalid part stays as it is."""
    if not written.startswith("\\"):
        return written
    try:
        text: str = json.loads(f'"{written}"')
    except ValueError:
        return written
    return encodable(text)


def _input_of(arguments: str) -> str:
    """The input in whole arguments: the parameter of that name, or else the only parameter."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    value = values.get(_INPUT, next(iter(values.values())) if len(values) == 1 else "")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return encodable(text)
