"""A copy of what counted in a log, from which its reader can recreate it.

Most of a copy are token ids and text: the events of a choice are joined, so that a token takes some
tens of bytes.
"""

from itertools import chain, groupby
from typing import TypeAlias

from msgspec.structs import replace

from shared.messages import (
    Accepted,
    Finished,
    HandedOver,
    PromptScores,
    Restored,
    Started,
    TokenDelta,
)

Kept: TypeAlias = Accepted | Started | HandedOver | PromptScores | TokenDelta | Finished

_MAX_APART = 32
"""Events that are kept apart before they are joined, which costs more than keeping them."""
_MAX_JOINED_TOKENS = 1024


class LogCopy:
    """The events of one log that counted. An event that ends the whole request is not kept."""

    def __init__(self) -> None:
        self.num_kept = 0
        """How many tokens and other events are kept."""
        self._joined: list[Kept] = []
        self._recent: list[Kept] = []

    def keep(self, event: Kept) -> None:
        """Append an event that counts."""
        self.num_kept += len(event.token_ids) if isinstance(event, TokenDelta) else 1
        self._recent.append(event)
        if len(self._recent) >= _MAX_APART:
            self._join()

    def restored(self) -> Restored:
        """The copy as the first event of another log."""
        self._join()
        return Restored(events=tuple(self._joined))

    def _join(self) -> None:
        """Join the token events of each choice, between two events of other kinds."""
        # What was joined last continues, if it is short.
        while self._joined and _is_short(self._joined[-1]):
            self._recent.insert(0, self._joined.pop())
        for is_delta, events in groupby(self._recent, lambda event: isinstance(event, TokenDelta)):
            if not is_delta:
                self._joined += events
                continue
            by_choice: dict[int, list[TokenDelta]] = {}
            for event in events:
                assert isinstance(event, TokenDelta)
                by_choice.setdefault(event.choice, []).append(event)
            self._joined += map(_joined, by_choice.values())
        self._recent = []


def _is_short(event: Kept) -> bool:
    return isinstance(event, TokenDelta) and len(event.token_ids) < _MAX_JOINED_TOKENS


def _joined(events: list[TokenDelta]) -> TokenDelta:
    """One event for consecutive ones of a choice and an attempt."""
    if len(events) == 1:
        return events[0]
    counts: list[int] = []
    for event in events:
        if event.token_ids:
            known = event.num_chars[: len(event.token_ids) - 1]
            unknown = (0,) * (len(event.token_ids) - 1 - len(known))
            counts += (*known, *unknown, len(event.text) - sum(known))
        elif counts:
            counts[-1] += len(event.text)
    return replace(
        events[0],
        token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
        text="".join([event.text for event in events]),
        num_chars=tuple(counts[:-1]),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
    )
