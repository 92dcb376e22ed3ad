"""Quarantine: jobs that were running when workers crashed run alone, so that no other job is at
risk."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Protocol

_ARRIVAL_S = 0.25
"""Seconds in which a consumer that has resumed receives jobs, if there are any."""


class Pausable(Protocol):
    """A consumer that can be paused."""

    async def pause(self) -> None:
        """Stop consuming until `resume`."""
        ...

    async def wait_idle(self) -> None:
        """Return when all jobs taken are done."""
        ...

    def resume(self) -> None: ...


class Solitude:
    """Lets a job run alone in the worker.

    A queue of such jobs does not starve the others: after each of them, the others run for as long
    as it took, or until there are none.
    """

    def __init__(self, *others: Sequence[Pausable]) -> None:
        """``others`` are groups of consumers; each group is paused once the groups before it are
        idle."""
        self._others = others
        self._free_at = 0.0
        """The monotonic time until which the others have precedence."""

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Pause the other consumers and wait until they are idle; they resume when this is left."""
        await self._let_others_run()
        began_at = time.monotonic()
        try:
            for group in self._others:
                await asyncio.gather(*(other.pause() for other in group))
                await self._wait_idle(group)
            yield
        finally:
            for other in chain.from_iterable(self._others):
                other.resume()
            left_at = time.monotonic()
            self._free_at = left_at + (left_at - began_at)

    async def _let_others_run(self) -> None:
        left_s = self._free_at - time.monotonic()
        if left_s <= 0:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await asyncio.sleep(_ARRIVAL_S)
                await self._wait_idle(chain.from_iterable(self._others))

    async def _wait_idle(self, others: Iterable[Pausable]) -> None:
        await asyncio.gather(*(other.wait_idle() for other in others))
