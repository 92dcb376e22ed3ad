"""The keys of JSON objects in an output: none is written twice, which no grammar can say."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from worker.text import Tokenizer

_MAX_KEPT = 4
"""As many vocabularies' tokens are kept."""
_FIRST_PRINTABLE = 0x20
"""Characters below it are escaped in strings."""
_BLANK = frozenset(b" \t\r\n")
_SCALAR = frozenset(b"0123456789+-.eEtrufalsn")
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_OUTSIDE, _BEFORE_KEY, _IN_KEY, _AFTER_KEY, _BEFORE_VALUE, _IN_STRING, _AFTER_VALUE = range(7)


class Quoted(NamedTuple):
    """The tokens that may end a key."""

    by_rest: Mapping[bytes, Sequence[int]]
    """The tokens with a quote, by the bytes before the first quote."""
    with_key: Sequence[tuple[int, bytes]]
    """The tokens that may contain a whole key, and their bytes."""


@functools.lru_cache(_MAX_KEPT)
def quoted_tokens(tokenizer: Tokenizer) -> Quoted:
    """The tokens of a vocabulary that may end a key. Takes some tenths of a second."""
    by_rest: dict[bytes, list[int]] = {}
    with_key = []
    for token_id in range(min(tokenizer.vocab_size, tokenizer.num_entries)):
        text = tokenizer.token_bytes(token_id)
        rest, quote, more = text.partition(b'"')
        if quote:
            by_rest.setdefault(rest, []).append(token_id)
            if b'"' in more:
                with_key.append((token_id, text))
    return Quoted(by_rest, with_key)


class JsonKeys:
    """Follows the objects in a text, and knows the keys of the open objects.

    Other text is passed over: text that is not JSON ends all objects that seem to be open.
    """

    def __init__(self, quoted: Quoted, *, is_json: bool = False) -> None:
        """``is_json``: whether the whole text is one value."""
        self._quoted = quoted
        self._state = _BEFORE_VALUE if is_json else _OUTSIDE
        self._is_escaped = False
        self._key = bytearray()
        self._open: list[set[bytes] | None] = []
        """The keys of each open object; None for an array."""

    def copy(self) -> "JsonKeys":
        result = JsonKeys(self._quoted)
        result._state, result._is_escaped = self._state, self._is_escaped
        result._key = self._key.copy()
        result._open = [None if keys is None else keys.copy() for keys in self._open]
        return result

    def read(self, text: bytes) -> bool:
        """Follow more of the text; returns whether it repeats a key."""
        is_repeated = False
        for byte in text:
            is_repeated |= self._read(byte)
        return is_repeated

    def repeating(self) -> Iterator[int]:
        """The tokens that would repeat a key."""
        keys = self._open[-1] if self._open else None
        if not keys:
            return
        ended: set[int] = set()
        if self._state == _IN_KEY:
            begun = bytes(self._key)
            for key in keys:
                if key.startswith(begun):
                    ended.update(self._quoted.by_rest.get(key[len(begun) :], ()))
        yield from ended
        for token_id, text in self._quoted.with_key:
            if token_id in ended or (self._state != _BEFORE_KEY and _COMMA not in text):
                continue
            if self.copy().read(text):
                yield token_id

    def _read(self, byte: int) -> bool:
        state = self._state
        if state in (_IN_KEY, _IN_STRING):
            return self._read_string(byte)
        if state == _OUTSIDE:
            if byte == _OPEN_OBJECT:
                self._open.append(set())
                self._state = _BEFORE_KEY
        elif byte in _BLANK:
            pass
        elif state == _BEFORE_KEY and byte == _QUOTE:
            self._key.clear()
            self._state = _IN_KEY
        elif state == _AFTER_KEY and byte == _COLON:
            self._state = _BEFORE_VALUE
        elif state in (_BEFORE_VALUE, _AFTER_VALUE):
            self._read_value(byte)
        elif state == _BEFORE_KEY and byte == _CLOSE_OBJECT:
            self._close()
        else:
            self._leave(byte)
        return False

    def _read_string(self, byte: int) -> bool:
        is_key = self._state == _IN_KEY
        if byte < _FIRST_PRINTABLE:
            self._leave(byte)
            return False
        if self._is_escaped or byte != _QUOTE:
            self._is_escaped = byte == _BACKSLASH and not self._is_escaped
            if is_key:
                self._key.append(byte)
            return False
        if not is_key:
            self._state = _AFTER_VALUE
            return False
        self._state = _AFTER_KEY
        keys, key = self._open[-1], bytes(self._key)
        assert keys is not None
        is_repeated = key in keys
        keys.add(key)
        return is_repeated

    def _read_value(self, byte: int) -> None:
        is_array = not self._open or self._open[-1] is None
        if byte in _SCALAR:
            self._state = _AFTER_VALUE
        elif self._state == _AFTER_VALUE and byte == _COMMA:
            self._state = _BEFORE_VALUE if is_array else _BEFORE_KEY
        elif byte == (_CLOSE_ARRAY if is_array else _CLOSE_OBJECT):
            self._close()
        elif self._state == _AFTER_VALUE:
            self._leave(byte)
        elif byte == _QUOTE:
            self._state = _IN_STRING
        elif byte == _OPEN_OBJECT:
            self._open.append(set())
            self._state = _BEFORE_KEY
        elif byte == _OPEN_ARRAY:
            self._open.append(None)
        else:
            self._leave(byte)

    def _close(self) -> None:
        if self._open:
            self._open.pop()
        self._state = _AFTER_VALUE if self._open else _OUTSIDE

    def _leave(self, byte: int) -> None:
        self._open.clear()
        self._state, self._is_escaped = _OUTSIDE, False
        if byte == _OPEN_OBJECT:
            self._read(byte)


def without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """A mask without some tokens."""
    result = bytearray(mask)
    for token_id in token_ids:
        result[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(result)
