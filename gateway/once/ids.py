"""The ids of shared executions, and of the streams of their clients.

All gateways derive the id of an execution from the tenant and the request, and find the same log in
the broker under it. The id of a client's stream is the id of its execution and a random number,
encrypted with a key that all gateways have, so that any gateway finds the log of any stream without
a table of streams. The cipher is a Feistel network of four rounds (Luby and Rackoff, 1988).
"""

import hmac
import re
import secrets
from collections.abc import Iterable

_HALF = 8
"""Bytes: an id has two halves."""
_SALT = 6
_CHECK = bytes(_HALF - _SALT)
"""The end of a decrypted id. Of the ids of other streams, one in 65,536 has it by chance: its
execution does not exist, and the stream is found under its own name."""
_ROUNDS = range(4)
_ID = re.compile(r"([a-z]{1,16}[-_])([0-9a-f]{32})")


class ExecutionIds:
    """Makes and reads ids with a key that all gateways share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def execution_id(self, prefix: str, tenant: str, digest: str) -> str:
        """The id of the execution of a tenant's request with this digest."""
        name = "\0".join((prefix, tenant, digest)).encode()
        return self._named(prefix, self._mac(b"n", name))

    def stream_id(self, execution_id: str) -> str:
        """A new id for a client of an execution."""
        prefix, digits = execution_id[: -4 * _HALF], execution_id[-4 * _HALF :]
        left = bytes.fromhex(digits)[:_HALF]
        right = secrets.token_bytes(_SALT) + _CHECK
        return prefix + b"".join(self._mixed(left, right, _ROUNDS)).hex()

    def execution_of(self, stream_id: str) -> str | None:
        """The id of the execution of a stream; None if the stream shares no execution."""
        match = _ID.fullmatch(stream_id)
        if match is None:
            return None
        digits = bytes.fromhex(match[2])
        # The halves are exchanged before and after the rounds, which therefore undo themselves.
        right, left = self._mixed(digits[_HALF:], digits[:_HALF], reversed(_ROUNDS))
        return self._named(match[1], left) if right.endswith(_CHECK) else None

    def _named(self, prefix: str, tag: bytes) -> str:
        return prefix + (tag + self._mac(b"i", prefix.encode() + tag)).hex()

    def _mixed(self, left: bytes, right: bytes, rounds: Iterable[int]) -> tuple[bytes, bytes]:
        for number in rounds:
            mask = self._mac(bytes([number]), right)
            left, right = right, bytes(a ^ b for a, b in zip(left, mask, strict=True))
        return left, right

    def _mac(self, purpose: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, purpose + text, "sha256")[:_HALF]
