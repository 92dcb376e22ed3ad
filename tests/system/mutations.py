"""Bodies that almost match what a reader expects, or not at all; equal for equal seeds."""

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from shared.messages import JSON, MSGPACK

_MARK = "@@deep@@"
_DEPTHS = (50, 5_000, 200_000)
_WRONG: tuple[Any, ...] = (
    None, True, -1, 0, (1 << 31) - 1, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 1e308, -1e308,
    math.nan, math.inf, "", "\x00", "\u202e", "x" * 70_000, [], [[]], {}, {"type": "text"},
    list(range(5_000)), [None] * 200, {"a": {"b": [{"c": 1}]}}, _MARK,
)  # fmt: skip


class Mutator:
    """Draws bodies that are made from the given messages."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choice(self, items: Sequence[Any]) -> Any:
        return self._random.choice(items)

    def body(self, message: Struct, content_type: str) -> bytes:
        """``message`` after up to three mutations, and in rare cases unchanged."""
        tree = msgspec.to_builtins(
            message, builtin_types=(bytes,) if content_type == MSGPACK else ()
        )
        for _ in range(self._random.randrange(3)):
            tree = self._wrong_inside(tree)
        body = _dumped(tree, content_type, self._random.choice(_DEPTHS))
        return self.mangled(body)

    def mangled(self, body: bytes) -> bytes:
        """Some bytes with random changes, or unchanged."""
        return self._random.choice(self._manglers)(body)

    @property
    def _manglers(self) -> list[Callable[[bytes], bytes]]:
        return [bytes, bytes, self._flipped, self._truncated, self._spliced, self._noise]

    def _wrong_inside(self, tree: Any) -> Any:
        """Change a value, remove a field, add a field, or double a value."""
        places = _places(tree)
        if not places:
            return self._wrong()
        holder, key = self._random.choice(places)
        match self._random.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[self._random.choice(["", "type", "x", "version"])] = self._wrong()
            case 2 if isinstance(holder[key], str | list):
                holder[key] = holder[key] * 2
            case _:
                holder[key] = self._wrong()
        return tree

    def _wrong(self) -> Any:
        return copy.deepcopy(self._random.choice(_WRONG))

    def _flipped(self, body: bytes) -> bytes:
        flipped = bytearray(body)
        for _ in range(self._random.randint(1, 8) if body else 0):
            flipped[self._random.randrange(len(flipped))] ^= 1 << self._random.randrange(8)
        return bytes(flipped)

    def _truncated(self, body: bytes) -> bytes:
        return body[: self._random.randrange(len(body) + 1)]

    def _spliced(self, body: bytes) -> bytes:
        """Copy a part of it to another place."""
        start, end, at = sorted(self._random.randrange(len(body) + 1) for _ in range(3))
        return body[:at] + body[start:end] + body[at:]

    def _noise(self, body: bytes) -> bytes:
        return self._random.randbytes(self._random.randrange(64))


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container in ``tree`` with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree) if type(tree) is list else 0)
    return [(tree, key) for key in keys] + [p for key in keys for p in _places(tree[key])]


def _dumped(tree: Any, content_type: str, depth: int) -> bytes:
    if content_type == JSON:
        deep = b"[" * depth + b"]" * depth
        return json.dumps(tree).encode().replace(f'"{_MARK}"'.encode(), deep)
    assert content_type == MSGPACK
    deep = b"\x91" * depth + b"\xc0"
    return msgspec.msgpack.encode(tree).replace(msgspec.msgpack.encode(_MARK), deep)
