"""How many tokens a request had, as its log tells."""

from collections import defaultdict

from msgspec import UNSET, Struct, UnsetType

from gateway.log.cursor import LogEvent
from shared.messages import Finished, Started, TokenDelta


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Always 0: writing to the prefix cache costs nothing."""


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenCounts:
    """Counts along a log. A prompt counts once, however many choices and attempts it has."""

    def __init__(self, num_drawn: int = 1, *, has_reasoning: bool = False) -> None:
        """``num_drawn``: choices of each prompt."""
        self.num_reasoning_tokens = 0
        self._num_drawn = num_drawn
        self._has_reasoning = has_reasoning
        self._num_prompt_tokens: int | None = None
        self._num_tokens = 0
        self._cached: defaultdict[int, list[int]] = defaultdict(list)

    def read(self, event: LogEvent) -> None:
        match event:
            case TokenDelta():
                self._num_tokens += len(event.token_ids)
            case Finished():
                self._num_tokens += len(event.token_ids)
                self._cached[event.choice // self._num_drawn].append(event.num_cached_tokens)
            case Started() if self._num_prompt_tokens is None:
                self._num_prompt_tokens = sum(event.num_prompt_tokens)

    @property
    def usage(self) -> Usage:
        return total(
            self._num_prompt_tokens or 0,
            self._num_tokens,
            # Further choices of a prompt find what its first one has computed.
            sum(map(min, self._cached.values())),
            self.num_reasoning_tokens if self._has_reasoning else None,
        )


def total(
    num_prompt_tokens: int,
    num_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None = None,
) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        completion_tokens_details=(
            UNSET if num_reasoning_tokens is None else CompletionTokensDetails(num_reasoning_tokens)
        ),
    )
