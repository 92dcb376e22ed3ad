"""Renders the streams of chats and completions: one chunk for each piece of each choice."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET

from gateway.api.render.choice_reader import ChoiceReader
from gateway.api.render.formats import (
    DONE,
    ENCODER,
    Chunk,
    ChunkChoice,
    TokenCounts,
    Usage,
    error_of,
    error_payload,
    obfuscation,
    system_fingerprint,
)
from gateway.api.rendering import Rendering
from gateway.log.cursor import LogEvent
from gateway.log.framing import Payload
from gateway.text.pieces import Content, Piece
from shared.errors import WarrenError
from shared.messages import Failed, Finished, PromptScores, Started, TokenDelta

_MARK = "\0"
_MARK_JSON = ENCODER.encode(_MARK)


class ChunkWords(Protocol):
    """Renders the parts of one endpoint's stream."""

    @property
    def chunk_object(self) -> str: ...

    def opening(self, event: Started) -> list[ChunkChoice]:
        """The first chunks of the choices, without text."""
        ...

    def scores(self, event: PromptScores) -> list[ChunkChoice]: ...

    def tokens(self, event: TokenDelta | Finished, pieces: Sequence[Piece]) -> list[ChunkChoice]:
        """New tokens of one choice, and the pieces of their text."""
        ...

    def plain(self, choice: int, text: str) -> ChunkChoice:
        """New text of one choice whose chunks contain nothing else."""
        ...

    def ending(self, event: Finished, *, has_called: bool) -> ChunkChoice: ...


class ChunkEncoder:
    """Renders the stream of one request, and counts its tokens."""

    def __init__(self, rendering: Rendering, words: ChunkWords) -> None:
        self._rendering = rendering
        self._words = words
        num_read = 0 if rendering.is_plain else rendering.total_drawn
        self._readers = [ChoiceReader(rendering) for _ in range(num_read)]
        self._counts = TokenCounts(rendering.num_drawn)
        # Completions have no such field.
        self._tier = rendering.service_tier if rendering.endpoint == "chat" else None
        self._has_begun = False
        self._is_plain = (
            rendering.is_plain
            and rendering.logprobs is None
            and not rendering.continuous_usage
            and not rendering.is_obfuscated
        )
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @property
    def usage(self) -> Usage:
        self._counts.num_reasoning_tokens = sum(
            reader.num_reasoning_tokens for reader in self._readers
        )
        return self._counts.usage

    @property
    def _fingerprint(self) -> str | None:
        return system_fingerprint(self._rendering, self._counts)

    def encode(self, event: LogEvent) -> list[Payload]:
        self._counts.read(event)
        match event:
            case TokenDelta():
                return self._tokens(event)
            case Finished():
                tokens = self._tokens(event)
                has_called = bool(self._readers) and self._readers[event.choice].has_called
                ending = self._words.ending(event, has_called=has_called)
                return [*tokens, self._chunk(ending, self._fingerprint)]
            case Started():
                is_first, self._has_begun = not self._has_begun, True
                return self._chunks(self._words.opening(event)) if is_first else []
            case PromptScores():
                return self._chunks(self._words.scores(event))
            case Failed():
                return self.fail(error_of(event))

    def end(self) -> list[Payload]:
        if not self._rendering.include_usage:
            return [DONE]
        return [self._encode((), self.usage, self._fingerprint), DONE]

    def fail(self, error: WarrenError) -> list[Payload]:
        return [error_payload(error)]

    def _tokens(self, event: TokenDelta | Finished) -> list[Payload]:
        if self._is_plain:
            # The worker holds back incomplete characters and possible stop strings.
            return [self._framed(event.choice, event.text)] if event.text else []
        if self._readers:
            reader = self._readers[event.choice]
            pieces = reader.read(event.text, len(event.token_ids), event.num_chars)
            if isinstance(event, Finished):
                pieces += reader.end()
        else:
            pieces = [Content(event.text)] if event.text else []
        return self._chunks(self._words.tokens(event, pieces))

    def _framed(self, choice: int, text: str) -> Payload:
        before, after = self._frames.get(choice) or self._new_frame(choice)
        return Payload(b"%b%b%b" % (before, ENCODER.encode(text), after))

    def _new_frame(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text in each chunk of a choice."""
        chunk = self._chunk(self._words.plain(choice, _MARK)).data
        before, _, after = chunk.partition(_MARK_JSON)
        self._frames[choice] = before, after
        return before, after

    def _chunks(self, choices: Sequence[ChunkChoice]) -> list[Payload]:
        return [self._chunk(choice) for choice in choices]

    def _chunk(self, choice: ChunkChoice, fingerprint: str | None = None) -> Payload:
        usage = self.usage if self._rendering.continuous_usage else None
        return self._encode((choice,), usage, fingerprint)

    def _encode(
        self, choices: Sequence[ChunkChoice], usage: Usage | None, fingerprint: str | None
    ) -> Payload:
        chunk = Chunk(
            id=self._rendering.request_id,
            object=self._words.chunk_object,
            created=self._rendering.created,
            model=self._rendering.model,
            choices=choices,
            # If usage is requested, it is null in all chunks but the last.
            usage=usage if self._rendering.include_usage else UNSET,
            service_tier=self._tier or UNSET,
            system_fingerprint=fingerprint or UNSET,
            obfuscation=self._padding(choices) if self._rendering.is_obfuscated else UNSET,
        )
        return Payload(ENCODER.encode(chunk))

    def _padding(self, choices: Sequence[ChunkChoice]) -> str:
        """For what the choices have more than ones with empty texts."""
        said = ENCODER.encode(choices)
        empty = ENCODER.encode([self._words.plain(choice.index, "") for choice in choices])
        return obfuscation(said, len(said) - len(empty))
