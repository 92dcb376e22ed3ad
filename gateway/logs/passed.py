"""What of a log has been passed on already, whichever pieces it came in.

A broker that dies may forget what it had delivered and not confirmed. It is written again then, by
whichever worker goes on, and perhaps cut into other events: so tokens and characters are counted.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from shared.messages import Finished, PromptScores, TokenDelta

Piece: TypeAlias = PromptScores | TokenDelta | Finished


@dataclass(slots=True)
class _Progress:
    """Of one choice."""

    num_tokens: int = 0
    num_chars: int = 0
    is_finished: bool = False


class Passed:
    """Counts what one client is given of a log that is read again and again."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Progress] = defaultdict(_Progress)
        self._num_scores: defaultdict[int, int] = defaultdict(int)
        """By prompt."""
        self._num_chars_read: defaultdict[int, int] = defaultdict(int)
        """Of each choice, since the log's start."""

    def begin(self) -> None:
        """The log is read from its start."""
        self._num_chars_read.clear()

    def news(self, event: Piece) -> Piece | None:
        """What of the log's next accepted event is new, if anything."""
        return self._new_scores(event) if isinstance(event, PromptScores) else self._new(event)

    def _new_scores(self, event: PromptScores) -> PromptScores | None:
        num_known = max(0, self._num_scores[event.prompt] - event.start)
        token_ids = event.token_ids[num_known:]
        if not token_ids:
            return None
        self._num_scores[event.prompt] = event.start + len(event.token_ids)
        start, logprobs = event.start + num_known, event.logprobs[num_known:]
        return msgspec.structs.replace(event, start=start, token_ids=token_ids, logprobs=logprobs)

    def _new(self, event: TokenDelta | Finished) -> TokenDelta | Finished | None:
        given = self._choices[event.choice]
        num_tokens = max(0, given.num_tokens - event.index)
        num_chars = max(0, given.num_chars - self._num_chars_read[event.choice])
        self._num_chars_read[event.choice] += len(event.text)
        token_ids, text = event.token_ids[num_tokens:], event.text[num_chars:]
        is_end = isinstance(event, Finished) and not given.is_finished
        if not (token_ids or text or is_end):
            return None
        given.num_tokens += len(token_ids)
        given.num_chars += len(text)
        given.is_finished |= is_end
        if not num_tokens and not num_chars:
            return event
        index, logprobs = given.num_tokens - len(token_ids), event.logprobs[num_tokens:]
        return msgspec.structs.replace(
            event, index=index, token_ids=token_ids, text=text, logprobs=logprobs
        )
