"""Frames payloads as Server-Sent Events, with the ids by which a client resumes its stream.

An id is a position in the answer: "12.57" is the position after all payloads for the first 12
tokens, whose text has 57 characters. Positions count tokens and characters instead of events. A
broker that crashes may lose messages that it had delivered but not confirmed, and a worker then
writes them again, possibly divided into other events. An id therefore has the same meaning for
every gateway that reads the log and every worker that wrote it.

"12.57~2" is the position after the first two payloads that follow "12.57". Such ids occur at the
stream's opening and its end, and within an event that results in several payloads because a tool
call or reasoning starts or ends in its text. Within an event, an id is valid only for the same
division of the log into events.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace

from gateway.log.visiting import LogVisitor, visit
from shared.errors import InvalidRequest, WarrenError
from shared.messages import (
    MAX_CHOICES,
    MAX_PROMPTS,
    Failed,
    Finished,
    PromptScores,
    Started,
    TokenDelta,
)

Piece: TypeAlias = PromptScores | TokenDelta | Finished
Spoken = TypeVar("Spoken", bound=TokenDelta | Finished)
_FIELD = re.compile(r"s(\d{1,9})|(\d{1,9})\.(\d{1,9})(e?)", re.ASCII)
PING = b": ping\n\n"
_SEPARATORS: Mapping[bytes, bytes] = {
    "\x85".encode(): rb"\u0085",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}
"""Line separators of Unicode, and what JSON writes instead: some clients split a stream at them."""
_FAILURE = 10**6
"""An id's second number counts payloads after the position. A failure takes 1,000,000, so that it
compares as later than any payload."""
_EVENT_ID = re.compile(r"([^~]*)(?:~(\d{1,9}))?", re.ASCII)


@dataclass(slots=True)
class _Progress:
    """The progress of a choice."""

    num_tokens: int = 0
    num_chars: int = 0
    is_finished: bool = False
    num_chars_read: int = 0
    """Since the start of the log."""
    word: str = "0.0"

    def pass_on(self, num_tokens: int, num_chars: int, *, is_end: bool) -> None:
        self.num_tokens += num_tokens
        self.num_chars += num_chars
        self.is_finished |= is_end
        self.word = f"{self.num_tokens}.{self.num_chars}{'e' if self.is_finished else ''}"


class ClientPosition:
    """Counts the parts of a log that a client has received, while the log is read repeatedly."""

    def __init__(self) -> None:
        self._choices: list[_Progress] = []
        self._num_scores: list[int] = []
        """The number of scores that the client has received of each prompt."""

    @classmethod
    def at(cls, place: str) -> "ClientPosition":
        """The state at ``place``. Raises `ValueError`."""
        passed = cls()
        fields = place.split("_", MAX_PROMPTS + MAX_CHOICES) if place else ()
        for field in fields:
            match = _FIELD.fullmatch(field)
            if match is None:
                raise ValueError(f"{field!r} is not part of a place")
            num_scores, num_tokens, num_chars, end = match.groups()
            if num_scores is not None:
                passed._num_scores.append(int(num_scores))
            else:
                passed._choices.append(_Progress())
                passed._choices[-1].pass_on(int(num_tokens), int(num_chars), is_end=bool(end))
        return passed

    @property
    def place(self) -> str:
        """The state as text: "12.57e" is 12 tokens with 57 characters, and the end of the choice.

        Choices are joined by "_", after the number of scores of each prompt: "s9_3.14_2.8". The
        initial state is "".
        """
        choices = "_".join([choice.word for choice in self._choices])
        if not self._num_scores:
            return choices
        scores = "_".join(f"s{num_scores}" for num_scores in self._num_scores)
        return f"{scores}_{choices}" if choices else scores

    def split(self, event: Piece) -> tuple[Piece | None, Piece | None]:
        """Split the log's next accepted event into the part passed on before and the new part, if
        any."""
        if isinstance(event, PromptScores):
            return self._split_scores(event)
        return self._split(event)

    def _split_scores(self, event: PromptScores) -> tuple[PromptScores | None, PromptScores | None]:
        while len(self._num_scores) <= event.prompt:
            self._num_scores.append(0)
        num_known = max(0, self._num_scores[event.prompt] - event.start)
        if num_known >= len(event.token_ids):
            return event, None
        self._num_scores[event.prompt] = event.start + len(event.token_ids)
        if not num_known:
            return None, event
        ids, logprobs = event.token_ids, event.logprobs
        known = replace(event, token_ids=ids[:num_known], logprobs=logprobs[:num_known])
        start, ids, logprobs = event.start + num_known, ids[num_known:], logprobs[num_known:]
        return known, replace(event, start=start, token_ids=ids, logprobs=logprobs)

    def _split(
        self, event: TokenDelta | Finished
    ) -> tuple[TokenDelta | Finished | None, TokenDelta | Finished | None]:
        while len(self._choices) <= event.choice:
            self._choices.append(_Progress())
        given = self._choices[event.choice]
        num_tokens = max(0, given.num_tokens - event.index)
        num_chars = max(0, given.num_chars - given.num_chars_read)
        given.num_chars_read += len(event.text)
        token_ids, text = event.token_ids[num_tokens:], event.text[num_chars:]
        is_end = isinstance(event, Finished) and not given.is_finished
        if not (token_ids or text or is_end):
            return event, None
        given.pass_on(len(token_ids), len(text), is_end=is_end)
        if not num_tokens and not num_chars:
            return None, event
        return head_of(event, num_tokens, num_chars), rest_of(event, num_tokens, num_chars)


def head_of(event: TokenDelta | Finished, num_tokens: int, num_chars: int) -> TokenDelta:
    """The first tokens and characters of an event."""
    return TokenDelta(
        choice=event.choice,
        attempt=event.attempt,
        index=event.index,
        prefix_hash=event.prefix_hash,
        token_ids=event.token_ids[:num_tokens],
        text=event.text[:num_chars],
        num_chars=event.num_chars[: max(0, num_tokens - 1)],
        logprobs=event.logprobs[:num_tokens],
        has_end_token=event.has_end_token and num_tokens == len(event.token_ids),
    )


def rest_of(event: Spoken, num_tokens: int, num_chars: int) -> Spoken:
    """The remainder of an event after `head_of`."""
    return replace(
        event,
        index=event.index + num_tokens,
        token_ids=event.token_ids[num_tokens:],
        text=event.text[num_chars:],
        num_chars=event.num_chars[num_tokens:],
        logprobs=event.logprobs[num_tokens:],
    )


class Payload(NamedTuple):
    """The data of a Server-Sent Event, and its event name, if it has a name."""

    data: bytes
    event: str | None = None
    after_number: bytes | None = None
    """If not None, the payload contains its number in the stream, between ``data`` and this."""
    has_place: bool = True
    """Whether a client can resume after it."""


class StreamEncoder(LogVisitor[list[Payload]], Protocol):
    """Renders the log of a request: each accepted event results in payloads.

    An encoder is a pure function of the log: every gateway that reads the log sends the same
    payloads in the same order. What it has rendered after any number of tokens depends only on the
    tokens, not on the events that contained them.
    """

    def end(self, receipt: str | None = None) -> list[Payload]:
        """The payloads after the end of the last choice, with the receipt if the answer has a
        receipt."""
        ...

    def fail(self, error: WarrenError) -> list[Payload]:
        """The last payloads of a stream that failed, in its log or in the gateway."""
        ...


class EventId(NamedTuple):
    """A position in a stream."""

    place: str = ""
    """`ClientPosition.place`."""
    num_payloads: int = 0
    """The number of payloads after ``place``."""

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """Parse a client's ``Last-Event-ID``; empty is the start of the stream. Raises
        `InvalidRequest`."""
        match = _EVENT_ID.fullmatch(text)
        try:
            if match is not None:
                return cls(ClientPosition.at(match[1]).place, int(match[2] or 0))
        except ValueError:
            pass
        raise InvalidRequest("This is not the id of an event.", param="Last-Event-ID")


START = EventId()


class Framer:
    """Frames the payloads of a stream that the client has not been sent yet."""

    def __init__(
        self, after: EventId = START, *, after_number: int = -1, is_numbered: bool = True
    ) -> None:
        """The client has received everything up to ``after``, and the payloads numbered up to
        ``after_number``, counted from 0. ``is_numbered``: whether frames have ids."""
        self.is_numbered = is_numbered
        self._after = after
        self._after_number = after_number
        self.has_sent = False
        """Whether the client was sent anything after which it can resume."""
        self._begin(after)

    def _begin(self, after: EventId) -> None:
        self._position = ClientPosition.at(after.place)
        self._has_begun = after.place != ""
        self._place = after.place.encode()
        self._num_payloads = 0
        self._num_already_sent = after.num_payloads
        """The number of payloads after ``_place`` that the client has received."""
        self._number = 0

    def restart(self) -> None:
        """Start again with the first event of the log; payloads that the client was sent are
        skipped.

        Numbers continue, although the earlier events may be divided differently this time.
        """
        if self.has_sent:
            number, num_already_sent = self._number, max(self._num_payloads, self._num_already_sent)
            self._begin(EventId(self._position.place, num_already_sent))
            self._number = number
        else:
            self._begin(self._after)

    def frame_start(self, payloads: Sequence[Payload]) -> bytes:
        """Frame the payloads of a `Started`."""
        if not self._has_begun:
            return self.frame_between(payloads)
        self._skip(len(payloads))
        return b""

    def frame_failure(self, payloads: Sequence[Payload]) -> bytes:
        """Frame the payloads of a `Failed`."""
        self._num_payloads = max(self._num_payloads, _FAILURE)
        return self.frame_between(payloads)

    def frame_piece(self, event: Piece, encoder: StreamEncoder) -> bytes:
        """The frames for the tokens, the scores or the end in an event, as rendered by
        ``encoder``."""
        known, new_part = self._position.split(event)
        if known is not None:
            self._skip(len(visit(known, encoder)))
        if new_part is None:
            return b""
        return self._frame_new_part(visit(new_part, encoder))

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        """Frame payloads that do not complete the text of any token."""
        frames = []
        for payload in payloads:
            if not payload.has_place:
                frames.append(self.frame_unnumbered(payload))
                continue
            self._num_payloads += 1
            if self._num_payloads > self._num_already_sent:
                frames.append(self._framed(b"%b~%d" % (self._place, self._num_payloads), payload))
            else:
                self._skip(1)
        return b"".join(frames)

    def frame_unnumbered(self, payload: Payload, *, retry_ms: int | None = None) -> bytes:
        """Frame a payload without an id: a client that resumes continues after the last id.

        ``retry_ms`` is the time after which an ``EventSource`` reconnects.
        """
        retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
        number, self._number = self._number, self._number + 1
        return _frame(retry, payload, number)

    def _frame_new_part(self, payloads: Sequence[Payload]) -> bytes:
        """Frame payloads. The last payload completes the new tokens."""
        frames = self.frame_between(payloads[:-1]) if len(payloads) > 1 else b""
        if self.is_numbered:
            self._place = self._position.place.encode()
        if payloads or self._num_already_sent > _FAILURE:
            self._num_already_sent = 0
        else:  # In the log that the client was sent, these tokens came in one event with the next.
            self._num_already_sent = max(0, self._num_already_sent - self._num_payloads)
        self._num_payloads = 0
        return frames + self._framed(self._place, payloads[-1]) if payloads else frames

    def _skip(self, num_payloads: int) -> None:
        """Count payloads that were sent on an earlier connection."""
        if not self.has_sent:
            self._number += num_payloads

    def _framed(self, place: bytes, payload: Payload) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after_number:
            return b""
        self.has_sent = True
        return _frame(b"id: %b\n" % place if self.is_numbered else b"", payload, number)


class FramedEncoder:
    """Makes frames of the accepted events of a log. ``encoder`` renders them."""

    def __init__(self, framer: Framer, encoder: StreamEncoder) -> None:
        self.encoder = encoder
        self._framer = framer

    def on_start(self, event: Started) -> bytes:
        return self._framer.frame_start(self.encoder.on_start(event))

    def on_scores(self, event: PromptScores) -> bytes:
        return self._framer.frame_piece(event, self.encoder)

    def on_tokens(self, event: TokenDelta) -> bytes:
        return self._framer.frame_piece(event, self.encoder)

    def on_finish(self, event: Finished) -> bytes:
        frame, encoder = self._framer.frame_piece, self.encoder
        if not (event.token_ids or event.text):
            return frame(event, encoder)
        # In another reading, the last tokens may come before the end.
        sizes = len(event.token_ids), len(event.text)
        return frame(head_of(event, *sizes), encoder) + frame(rest_of(event, *sizes), encoder)

    def on_failure(self, event: Failed) -> bytes:
        return self._framer.frame_failure(self.encoder.on_failure(event))


def _frame(head: bytes, payload: Payload, number: int) -> bytes:
    data = payload.data
    if any(separator in data for separator in _SEPARATORS):
        for separator, escaped in _SEPARATORS.items():
            data = data.replace(separator, escaped)
    if payload.event is None:
        return b"%bdata: %b\n\n" % (head, data)
    if payload.after_number is not None:
        data = b"%b%d%b" % (data, number, payload.after_number)
    return b"%bevent: %b\ndata: %b\n\n" % (head, payload.event.encode(), data)
