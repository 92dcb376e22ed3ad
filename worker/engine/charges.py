"""Whose the time of the machine is: of a step's sequences, or of all that a server runs at once."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


def divided(duration_s: float, num_tokens: Mapping[Key, int]) -> dict[Key, float]:
    """The part of a step's duration that belongs to each sequence, by the tokens that the step
    computed of it. The parts add up to the duration, unless there is no sequence."""
    total = sum(num_tokens.values())
    return {key: duration_s * count / total for key, count in num_tokens.items()}


class SharedTime(Generic[Key]):
    """Divides wall time equally among the keys that are at work at each moment.

    The parts of all keys add up to the time in which at least one key was at work.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns the time in seconds."""
        self._clock = clock
        self._counted_at = clock()
        self._each_s = 0.0
        """The part of a key that has been at work from the beginning."""
        self._settled_s: dict[Key, float] = {}
        """``_each_s`` when each key at work began, or was last settled."""
        self._parts_s: dict[Key, float] = {}

    def enter(self, key: Key) -> None:
        """``key`` is at work from now on."""
        self._count()
        self._settled_s[key] = self._each_s

    def settle(self, key: Key) -> None:
        """Let the next `take` return the part of ``key`` until now. It must be at work."""
        self._count()
        part_s = self._each_s - self._settled_s[key]
        self._settled_s[key] = self._each_s
        self._parts_s[key] = self._parts_s.get(key, 0.0) + part_s

    def settle_all(self) -> None:
        """`settle` all that are at work."""
        for key in [*self._settled_s]:
            self.settle(key)

    def leave(self, key: Key) -> None:
        """``key``, which is at work, is not any more."""
        self.settle(key)
        del self._settled_s[key]

    def take(self) -> dict[Key, float]:
        """The parts that were settled since the previous call, in seconds."""
        parts_s, self._parts_s = self._parts_s, {}
        return parts_s

    def _count(self) -> None:
        now = self._clock()
        if self._settled_s:
            self._each_s += (now - self._counted_at) / len(self._settled_s)
        self._counted_at = now
