"""Accepted log events as the payloads of Server-Sent Events.

An encoder is a pure function of the log: whoever reads it again, on whichever gateway, sends the
same payloads in the same order. What it has said after any number of tokens depends on the tokens
alone, not on the events that contained them.
"""

from typing import NamedTuple, Protocol

import msgspec

from gateway.api.render.usage import Usage
from gateway.errors import error_body
from gateway.log.cursor import LogEvent
from shared import errors
from shared.errors import WarrenError
from shared.messages import Failed

ENCODER = msgspec.json.Encoder()


class Payload(NamedTuple):
    """The data of one Server-Sent Event, and its name where its reader goes by names."""

    data: bytes
    event: str | None = None
    after_number: bytes | None = None
    """What follows ``data`` and the payload's number in its stream, if it contains that."""


DONE = Payload(b"[DONE]")


class StreamEncoder(Protocol):
    """Words the stream of one request."""

    @property
    def usage(self) -> Usage:
        """Of what was encoded so far."""
        ...

    def encode(self, event: LogEvent) -> list[Payload]:
        """What one accepted event of the log becomes: any number of payloads."""
        ...

    def end(self) -> list[Payload]:
        """What follows the last choice's end."""
        ...

    def fail(self, error: WarrenError) -> list[Payload]:
        """What a stream ends with that failed: in its log, or in the gateway."""
        ...


def error_payload(error: WarrenError) -> Payload:
    """The last payload of a failed stream, as clients of chat and completions know it."""
    return Payload(ENCODER.encode(error_body(error)))


def error_of(event: Failed) -> WarrenError:
    return errors.from_code(event.code, event.message, event.param)
