"""The order in which the lines of a batch run.

Long answers start first, so that no worker is idle while the last line of the batch runs. Among
lines whose answers have similar lengths, lines with equal beginnings run one after another, so that
they share the KV cache of a worker. The order depends on the file alone: a gateway that continues a
batch finds it again.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from gateway.batches.lines import LINE_DECODER, UNREADABLE, InputLine
from gateway.batches.twins import twin_key
from shared.off_loop import off_loop

_DEPTHS = tuple(256 << k for k in range(9))
"""The bytes of a prompt after which its beginning is compared with the beginnings of others."""
_DIGEST_BYTES = 4
_MAX_TOKENS = (1 << 32) - 1
"""The expected length of an answer without a limit."""


class _Ranked(msgspec.Struct, frozen=True):
    """The fields of the request that decide about its place, of all endpoints."""

    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_tokens: Any = None
    tools: Any = None
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None

    @property
    def max_len(self) -> int:
        """The most tokens that the answer may have."""
        limits = (self.max_completion_tokens, self.max_output_tokens, self.max_tokens)
        given = [limit for limit in limits if isinstance(limit, int) and limit >= 0]
        return min([_MAX_TOKENS, *given])

    @property
    def start(self) -> bytes:
        """The prompt in the order in which templates write it."""
        parts = (self.tools, self.instructions, self.messages, self.prompt, self.input)
        return msgspec.json.encode(parts, order="sorted")


_RANKED_DECODER = msgspec.json.Decoder(_Ranked)


def rank(body: bytes | msgspec.Raw) -> bytes:
    """The place of a request among the requests of its model: lower ranks run first. All ranks have
    the same length.

    The rank begins with the binary order of magnitude of the answer's maximum length. Digests of
    the beginnings of the prompt follow, so that the longer the equal beginnings of two prompts are,
    the closer are their ranks. Its end is the length itself, which decides among short prompts.
    """
    request = _Ranked()
    with suppress(*UNREADABLE):  # its answer is an error, in whatever order
        request = _RANKED_DECODER.decode(body)
    magnitude = _MAX_TOKENS.bit_length() - request.max_len.bit_length()
    length = (_MAX_TOKENS - request.max_len).to_bytes(4)
    return bytes([magnitude]) + _digests(request.start) + length


def _digests(text: bytes) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    digests, last = b"", 0
    for depth in _DEPTHS:
        if len(text) < depth:
            break
        digest.update(text[last:depth])
        digests += digest.digest()
        last = depth
    return digests.ljust(_DIGEST_BYTES * len(_DEPTHS), b"\0")


class LinePlace(NamedTuple):
    """Where a line is in its file."""

    number: int
    start: int
    """The offset of its first byte."""
    end: int
    num_bytes: int
    """The memory that the line takes while it runs."""
    twin_key: bytes = b""
    """`gateway.batches.twins.twin_key` of its request."""


class LineOrder:
    """The lines of a batch in their order, in a temporary database. Data that exceeds its cache is
    in a file that SQLite deletes."""

    def __init__(self, *, is_ranked: bool = True) -> None:
        """Without ``is_ranked``, lines have the order of the file."""
        self._is_ranked = is_ranked
        self._database = sqlite3.connect("")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE lines (model TEXT, rank BLOB, number INTEGER, start INTEGER, end INTEGER,"
            " num_bytes INTEGER, twin BLOB, PRIMARY KEY (model, rank, number)) WITHOUT ROWID"
        )

    def close(self) -> None:
        self._database.close()

    async def add(self, line: InputLine, model: str) -> None:
        """Add a line of a checked file; again, it changes nothing."""
        assert line.text is not None
        rank_, twin = await off_loop(partial(_place_of, line.text), len(line.text))
        row = (
            model,
            rank_ if self._is_ranked else b"",
            line.number,
            line.start,
            line.start + len(line.text),
        )
        self._database.execute(
            "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*row, await line.num_bytes(), twin),
        )

    def of_model(self, model: str) -> Iterator[LinePlace]:
        """The lines of a model, in the order in which they run. Equal lines follow each other."""
        query = (
            "SELECT number, start, end, num_bytes, twin FROM lines WHERE model = ?"
            " ORDER BY rank, CASE twin WHEN x'' THEN number"
            " ELSE MIN(number) OVER (PARTITION BY rank, twin) END, number"
        )
        return map(LinePlace._make, self._database.execute(query, (model,)))


def _place_of(text: bytes) -> tuple[bytes, bytes]:
    """The rank of a line, and the key that equal lines have."""
    body: bytes | msgspec.Raw = b""
    with suppress(*UNREADABLE):
        body = LINE_DECODER.decode(text).body
    return rank(body), twin_key(body)
