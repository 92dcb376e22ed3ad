"""Accepted log events as Server-Sent Events, framed as OpenAI's clients expect them.

An event of the log becomes no, one or two of these, each with the log event's ordinal as its id.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.formats import Answer, AnswerFormat, Choice, Usage
from gateway.http_errors import error_body
from shared import errors
from shared.errors import WarrenError
from shared.messages import Failed, Finished, GenerationJob, Started, TokenDelta
from shared.stream import Relay

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_ENCODER = msgspec.json.Encoder()
_MARK = "\0"
_MARK_JSON = _ENCODER.encode(_MARK)


def error_event(error: WarrenError, ordinal: int | None = None) -> bytes:
    """The last event of a stream that failed."""
    return _event(_ENCODER.encode(error_body(error)), ordinal)


class ChunkEncoder:
    """Encodes the stream of one request."""

    def __init__(self, job: GenerationJob, words: AnswerFormat, *, include_usage: bool) -> None:
        self._num_choices = len(job.prompts)
        self._words = words
        self._head: dict[str, Any] = {
            "id": job.request_id,
            "object": words.chunk_object,
            "created": int(job.created_at),
            "model": job.model,
        }
        # With the usage asked for, all chunks but the last say null.
        self._usage = None if include_usage else msgspec.UNSET
        self._include_usage = include_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, relays: Iterable[Relay]) -> bytes:
        return b"".join(self._encode(relay) for relay in relays)

    def end(self, usage: Usage) -> bytes:
        """What follows the last choice's end."""
        if not self._include_usage:
            return DONE
        chunk = Answer(**self._head, choices=(), usage=usage)
        return _event(_ENCODER.encode(chunk)) + DONE

    def _encode(self, relay: Relay) -> bytes:
        event, ordinal = relay.event, relay.ordinal
        match event:
            case TokenDelta():
                return self._piece(event, ordinal)
            case Finished():
                ending = self._chunk(self._words.ending(event), ordinal)
                return self._piece(event, ordinal) + ending
            case Started():
                openings = map(self._words.opening, range(self._num_choices))
                return b"".join(self._chunk(opening) for opening in openings if opening)
            case Failed():
                error = errors.from_code(event.code, event.message, event.param)
                return error_event(error, ordinal)

    def _piece(self, event: TokenDelta | Finished, ordinal: int) -> bytes:
        # Half a character, or what may be a stop string, is held back by the worker.
        if not event.text:
            return b""
        before, after = self._frames.get(event.choice) or self._new_frame(event.choice)
        return b"id: %d\ndata: %b%b%b\n\n" % (ordinal, before, _ENCODER.encode(event.text), after)

    def _new_frame(self, choice: int) -> tuple[bytes, bytes]:
        """What stands around the text in each chunk of a choice."""
        chunk = self._encode_chunk(self._words.piece(choice, _MARK))
        before, _, after = chunk.partition(_MARK_JSON)
        self._frames[choice] = before, after
        return before, after

    def _chunk(self, choice: Choice, ordinal: int | None = None) -> bytes:
        return _event(self._encode_chunk(choice), ordinal)

    def _encode_chunk(self, choice: Choice) -> bytes:
        return _ENCODER.encode(Answer(**self._head, choices=(choice,), usage=self._usage))


def _event(data: bytes, ordinal: int | None = None) -> bytes:
    if ordinal is None:
        return b"data: %b\n\n" % data
    return b"id: %d\ndata: %b\n\n" % (ordinal, data)
