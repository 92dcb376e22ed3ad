"""Payloads as Server-Sent Events: their ids, and which of them a client has seen.

An id names a place in a request's answer: "12.57" stands behind everything that is said of the
first 12 tokens, whose text has 57 characters. Tokens decide what the payloads say, not the events
in which they come, so that an id means the same whoever reads the log, and whoever wrote it.

"12.57~2" stands behind the first two payloads that follow: those of the stream's opening and its
end, and all but the last one of an event that has several, because a call or a thought begins or
ends in its text. Within such an event an id holds for the log as it was cut when it was read.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.log.cursor import LogEvent
from gateway.log.passed import Passed, Piece, head_of, rest_of
from shared.errors import InvalidRequest, WarrenError
from shared.messages import Failed, Finished, Started

PING = b": ping\n\n"
_FAILURE = 10**6
"""Payloads before that of a failure, for its id: more than any event has."""
_EVENT_ID = re.compile(r"([^~]*)(?:~(\d{1,9}))?", re.ASCII)


class Payload(NamedTuple):
    """The data of one Server-Sent Event, and its name where its reader goes by names."""

    data: bytes
    event: str | None = None
    after_number: bytes | None = None
    """What follows ``data`` and the payload's number in its stream, if it contains that."""
    has_place: bool = True
    """Whether a client can return to the place behind it."""


class StreamEncoder(Protocol):
    """Renders the log of one request.

    An encoder is a pure function of the log: whoever reads it again, on whichever gateway, sends
    the same payloads in the same order. What it has rendered after any number of tokens depends on
    the tokens alone, not on the events that contained them.
    """

    def encode(self, event: LogEvent) -> list[Payload]:
        """What one accepted event of the log becomes: any number of payloads."""
        ...

    def end(self) -> list[Payload]:
        """What follows the last choice's end."""
        ...

    def fail(self, error: WarrenError) -> list[Payload]:
        """What a stream ends with that failed: in its log, or in the gateway."""
        ...


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
    """Frames the payloads of one stream, without those that the client has been sent."""

    def __init__(
        self, after: EventId = START, *, after_number: int = -1, is_numbered: bool = True
    ) -> None:
        """The client has seen everything up to the place ``after``, and the payloads that are
        numbered up to ``after_number``, from 0. ``is_numbered``: whether frames have ids."""
        self.is_numbered = is_numbered
        self._after = after
        self._after_number = after_number
        self.has_sent = False
        """Whether the client was sent anything that has a place."""
        self._begin(after)

    def _begin(self, after: EventId) -> None:
        self._passed = Passed.at(after.place)
        self._has_begun = after.place != ""
        self._place = after.place.encode()
        self._num_payloads = 0
        self._num_seen = after.num_payloads
        """Of those behind ``_place``."""
        self._number = 0

    def restart(self) -> None:
        """Start again with the log's first event: the client has seen what it was sent.

        Numbers continue, although the events before may be divided otherwise this time.
        """
        if self.has_sent:
            number, num_seen = self._number, max(self._num_payloads, self._num_seen)
            self._begin(EventId(self._passed.place, num_seen))
            self._number = number
        else:
            self._begin(self._after)

    def frame(self, event: LogEvent, encoder: StreamEncoder) -> bytes:
        """What ``encoder`` says of the log's next accepted event."""
        match event:
            case Started():
                payloads = encoder.encode(event)
                if not self._has_begun:
                    return self.frame_between(payloads)
                self._skip(len(payloads))
                return b""
            case Failed():
                self._num_payloads = max(self._num_payloads, _FAILURE)
                return self.frame_between(encoder.encode(event))
            case Finished() if event.token_ids or event.text:
                # In another reading, the last tokens may come before the end.
                sizes = len(event.token_ids), len(event.text)
                last = self._frame(head_of(event, *sizes), encoder)
                return last + self._frame(rest_of(event, *sizes), encoder)
            case _:
                return self._frame(event, encoder)

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads behind which the stream is at no other place yet."""
        frames = []
        for payload in payloads:
            if not payload.has_place:
                frames.append(self.frame_unnumbered(payload))
                continue
            self._num_payloads += 1
            if self._num_payloads > self._num_seen:
                frames.append(self._framed(b"%b~%d" % (self._place, self._num_payloads), payload))
            else:
                self._skip(1)
        return b"".join(frames)

    def frame_unnumbered(self, payload: Payload, *, retry_ms: int | None = None) -> bytes:
        """A payload that is no place in the stream: a client that returns is sent what follows the
        last place.

        ``retry_ms`` tells an ``EventSource`` when to return.
        """
        retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
        number, self._number = self._number, self._number + 1
        return _frame(retry, payload, number)

    def _frame(self, event: Piece, encoder: StreamEncoder) -> bytes:
        known, news = self._passed.split(event)
        if known is not None:
            self._skip(len(encoder.encode(known)))
        if news is None:
            return b""
        return self._frame_news(encoder.encode(news))

    def _frame_news(self, payloads: Sequence[Payload]) -> bytes:
        """Payloads the last of which completes what was new."""
        frames = self.frame_between(payloads[:-1]) if len(payloads) > 1 else b""
        if self.is_numbered:
            self._place = self._passed.place.encode()
        self._num_payloads = self._num_seen = 0
        return frames + self._framed(self._place, payloads[-1]) if payloads else frames

    def _skip(self, num_payloads: int) -> None:
        """Payloads of before this connection are counted as this log divides them."""
        if not self.has_sent:
            self._number += num_payloads

    def _framed(self, place: bytes, payload: Payload) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after_number:
            return b""
        self.has_sent = True
        return _frame(b"id: %b\n" % place if self.is_numbered else b"", payload, number)


def _frame(head: bytes, payload: Payload, number: int) -> bytes:
    if payload.event is None:
        return b"%bdata: %b\n\n" % (head, payload.data)
    data = payload.data
    if payload.after_number is not None:
        data = b"%b%d%b" % (data, number, payload.after_number)
    return b"%bevent: %b\ndata: %b\n\n" % (head, payload.event.encode(), data)
