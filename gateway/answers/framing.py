"""The ids of Server-Sent Events, and which of them a client has seen.

An id names a place in a request's log: "7" stands behind everything that the log's accepted event 7
says, and "7.2" behind the first two payloads that follow. The log decides what the payloads are, so
that an id means the same whoever reads the log.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.answers.sse import Payload
from shared.errors import InvalidRequest

PING = b": ping\n\n"
_EVENT_ID = re.compile(r"(\d{1,15})(?:\.(\d{1,15}))?", re.ASCII)


class EventId(NamedTuple):
    """A place in a stream; places compare as they follow each other."""

    ordinal: int = 0
    num_payloads: int = 0
    """Of those behind event ``ordinal``."""

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """Read a client's ``Last-Event-ID``; empty is the stream's start. Raises
        `InvalidRequest`."""
        match = _EVENT_ID.fullmatch(text or "0")
        if match is None:
            raise InvalidRequest("This is not the id of an event.", param="Last-Event-ID")
        return cls(int(match[1]), int(match[2] or 0))


START = EventId()


class Framer:
    """Frames the payloads of one stream, without those that the client has seen."""

    def __init__(self, after: EventId = START, *, is_numbered: bool = True) -> None:
        """``is_numbered``: whether the frames bear their ids."""
        self.is_numbered = is_numbered
        self._after = after
        self._ordinal = 0
        self._num_payloads = 0

    def frame(self, ordinal: int, payloads: Sequence[Payload]) -> bytes:
        """The payloads of the log's event ``ordinal``, the last of which completes it."""
        if ordinal <= self._ordinal:
            return self.frame_between(payloads)
        frames = self.frame_between(payloads[:-1]) if len(payloads) > 1 else b""
        self._ordinal, self._num_payloads = ordinal, 0
        if not payloads or ordinal <= self._after.ordinal:
            return frames
        return frames + self._framed(b"id: %d\n" % ordinal, payloads[-1])

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads that complete no event of the log."""
        frames = []
        for payload in payloads:
            self._num_payloads += 1
            if (self._ordinal, self._num_payloads) > self._after:
                place = b"id: %d.%d\n" % (self._ordinal, self._num_payloads)
                frames.append(self._framed(place, payload))
        return b"".join(frames)

    def _framed(self, place: bytes, payload: Payload) -> bytes:
        return _frame(place if self.is_numbered else b"", payload)


def frame_unnumbered(payload: Payload, *, retry_ms: int | None = None) -> bytes:
    """A payload that is no place in the stream: who comes back gets what follows the last place.

    ``retry_ms`` tells an ``EventSource`` when to come back.
    """
    retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
    return _frame(retry, payload)


def _frame(head: bytes, payload: Payload) -> bytes:
    if payload.event is None:
        return b"%bdata: %b\n\n" % (head, payload.data)
    return b"%bevent: %b\ndata: %b\n\n" % (head, payload.event.encode(), payload.data)
