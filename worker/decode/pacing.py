"""How many tokens of a stream gather for an event, so that events leave the CPU to the engine.

An event costs the worker, the broker and the reader a fraction of a millisecond, whether it has one
token or ten. On a machine that computes on its CPU, or whose engine shares Python's lock with the
event loop, that time is missing for tokens.
"""

import time
from collections.abc import Callable

_LOOK_INTERVAL_S = 0.5
_IDLE_S = 2.0
_MAX_CHANGE = 2.0


class EventPacing:
    """Raises the number of tokens for an event until the event loop's thread keeps to its share of
    a core. No token waits longer than ``max_delay_s`` for the others."""

    def __init__(
        self,
        cpu_share: float,
        max_delay_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """To be created and called in the thread of the event loop, whose CPU time ``cpu_clock``
        returns."""
        self.num_gathered = 1
        """How many tokens of each sequence gather."""
        self.max_delay_s = max_delay_s
        self._cpu_share = cpu_share
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._factor = 1.0
        self._num_steps = 0
        self._looked_at = clock()
        self._cpu_s = cpu_clock()

    def step(self) -> None:
        """Take note of a step of the engine, from which each running sequence has a token."""
        self._num_steps += 1
        elapsed_s = self._clock() - self._looked_at
        if elapsed_s < _LOOK_INTERVAL_S:
            return
        if elapsed_s < _IDLE_S:
            self._adjust(elapsed_s)
        self._num_steps = 0
        self._looked_at, self._cpu_s = self._clock(), self._cpu_clock()

    def _adjust(self, elapsed_s: float) -> None:
        share = (self._cpu_clock() - self._cpu_s) / elapsed_s
        change = min(max(share / self._cpu_share, 1 / _MAX_CHANGE), _MAX_CHANGE)
        step_s = elapsed_s / self._num_steps
        most = 1 + self.max_delay_s / step_s
        self._factor = min(max(self._factor * change, 1.0), most)
        self.num_gathered = int(self._factor)
