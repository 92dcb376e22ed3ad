"""The ids of Server-Sent Events, and which of them a client has seen.

An id names a place in a request's answer: "12.57" stands behind everything that is said of the
first 12 tokens, whose text has 57 characters, and "12.57~2" behind the first two payloads that
follow. Tokens decide what the payloads are, not the events in which they come, so that an id means
the same whoever reads the log, and whoever wrote it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.answers.sse import Payload, StreamEncoder
from gateway.logs.passed import Passed
from shared.errors import InvalidRequest
from shared.messages import Failed, Started
from shared.stream import Relay

PING = b": ping\n\n"
_EVENT_ID = re.compile(r"([^~]*)(?:~(\d{1,9}))?", re.ASCII)


class EventId(NamedTuple):
    """A place in a stream."""

    place: str = ""
    """`Passed.place`."""
    num_payloads: int = 0
    """Of those behind it."""

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """Read a client's ``Last-Event-ID``; empty is the stream's start. Raises
        `InvalidRequest`."""
        match = _EVENT_ID.fullmatch(text)
        try:
            if match is not None:
                return cls(Passed.at(match[1]).place, int(match[2] or 0))
        except ValueError:
            pass
        raise InvalidRequest("This is no event's id.", param="Last-Event-ID")


START = EventId()


class Framer:
    """Frames the payloads of one stream, without those that the client has seen."""

    def __init__(self, after: EventId = START, *, is_numbered: bool = True) -> None:
        """``is_numbered``: whether the frames bear their ids."""
        self.is_numbered = is_numbered
        self._passed = Passed.at(after.place)
        self._has_begun = after.place != ""
        self._place = after.place.encode()
        self._num_payloads = 0
        self._num_seen = after.num_payloads
        """Of those behind ``_place``."""

    def frame(self, relay: Relay, encoder: StreamEncoder) -> bytes:
        """What ``encoder`` says of the log's next accepted event."""
        event = relay.event
        if isinstance(event, Started | Failed):
            payloads = encoder.encode(relay)
            is_known = self._has_begun and isinstance(event, Started)
            return b"" if is_known else self.frame_between(payloads)
        known, news = self._passed.split(event)
        if known is not None:
            encoder.encode(Relay(relay.ordinal, known))
        if news is None:
            return b""
        return self._frame_news(encoder.encode(Relay(relay.ordinal, news)))

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads behind which the stream is at no other place yet."""
        frames = []
        for payload in payloads:
            self._num_payloads += 1
            if self._num_payloads > self._num_seen:
                frames.append(self._framed(b"%b~%d" % (self._place, self._num_payloads), payload))
        return b"".join(frames)

    def _frame_news(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads the last of which completes what was new."""
        frames = self.frame_between(payloads[:-1]) if len(payloads) > 1 else b""
        self._place = self._passed.place.encode()
        self._num_payloads = self._num_seen = 0
        return frames + self._framed(self._place, payloads[-1]) if payloads else frames

    def _framed(self, place: bytes, payload: Payload) -> bytes:
        return _frame(b"id: %b\n" % place if self.is_numbered else b"", payload)


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
