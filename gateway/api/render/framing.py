"""The ids of Server-Sent Events, and which of them a client has seen.

An id names a place in a request's answer: "12.57" stands behind everything that is said of the
first 12 tokens, whose text has 57 characters. Tokens decide what the payloads say, not the events
in which they come, so that an id means the same whoever reads the log, and whoever wrote it.

"12.57~2" stands behind the first two payloads that follow: those of the stream's opening and its
end, and all but the last one of an event that has several, because a call or a thought begins or
ends in its text. Within such an event an id holds for the log as it was cut when it was read.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.api.render.sse import Payload, StreamEncoder
from gateway.log.passed import Passed, Piece, head_of, rest_of
from shared.errors import InvalidRequest
from shared.log import Relay
from shared.messages import Failed, Finished, Started

PING = b": ping\n\n"
_FAILURE = 10**6
"""Payloads before that of a failure, for its id: more than any event has."""
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
        match relay.event:
            case Started():
                payloads = encoder.encode(relay)
                return b"" if self._has_begun else self.frame_between(payloads)
            case Failed():
                self._num_payloads = max(self._num_payloads, _FAILURE)
                return self.frame_between(encoder.encode(relay))
            case Finished() as event if event.token_ids or event.text:
                # Another telling may have told the last tokens before the end.
                sizes = len(event.token_ids), len(event.text)
                last = self._frame(head_of(event, *sizes), relay, encoder)
                return last + self._frame(rest_of(event, *sizes), relay, encoder)
            case event:
                return self._frame(event, relay, encoder)

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads behind which the stream is at no other place yet."""
        frames = []
        for payload in payloads:
            self._num_payloads += 1
            if self._num_payloads > self._num_seen:
                frames.append(self._framed(b"%b~%d" % (self._place, self._num_payloads), payload))
        return b"".join(frames)

    def _frame(self, event: Piece, relay: Relay, encoder: StreamEncoder) -> bytes:
        known, news = self._passed.split(event)
        if known is not None:
            encoder.encode(Relay(relay.ordinal, known))
        if news is None:
            return b""
        return self._frame_news(encoder.encode(Relay(relay.ordinal, news)))

    def _frame_news(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads the last of which completes what was new."""
        frames = self.frame_between(payloads[:-1]) if len(payloads) > 1 else b""
        if self.is_numbered:
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
