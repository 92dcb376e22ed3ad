"""Tracks which parts of a log have been passed on, independent of the division into events.

A broker that crashes may lose messages that it had delivered but not confirmed. A worker then
writes them again, possibly divided into other events. Progress is therefore counted in tokens and
characters.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from shared.messages import MAX_CHOICES, MAX_PROMPTS, Finished, PromptScores, TokenDelta

Piece: TypeAlias = PromptScores | TokenDelta | Finished
Spoken = TypeVar("Spoken", bound=TokenDelta | Finished)
_FIELD = re.compile(r"s(\d{1,9})|(\d{1,9})\.(\d{1,9})(e?)", re.ASCII)


@dataclass(slots=True)
class _Progress:
    """The progress of one choice."""

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


class Passed:
    """Counts what one client has received of a log that is read repeatedly."""

    def __init__(self) -> None:
        self._choices: list[_Progress] = []
        self._num_scores: list[int] = []
        """By prompt."""

    @classmethod
    def at(cls, place: str) -> "Passed":
        """The state at ``place``. Raises `ValueError`."""
        passed = cls()
        fields = place.split("_", MAX_PROMPTS + MAX_CHOICES) if place else ()
        for field in fields:
            match = _FIELD.fullmatch(field)
            if match is None:
                raise ValueError(f"{field!r} is no part of a place")
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

    def begin(self) -> None:
        """Start reading the log from its beginning again."""
        for choice in self._choices:
            choice.num_chars_read = 0

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
