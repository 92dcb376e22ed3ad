"""Jobs that move to another queue. Those that were running when workers crashed go into quarantine:
they run alone, so that no other job is at risk."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Protocol

import msgspec

from shared.bus.base import DEATH_REASON_HEADER, Message
from shared.messages import GenerationJob, encode

_RETURNS_HEADER = "warren-returns"
"""How often the messages were returned that a message replaces, for a job without a log."""

_ARRIVAL_S = 0.25
"""Seconds in which a consumer that has resumed receives jobs, if there are any."""
_BROKER_PREFIX = "x-"
"""Of headers that the broker has added, such as those of a dead letter."""


def as_message(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as a new message in place of ``message``, whose returns are counted from
    ``num_returns``."""
    headers = {
        name: value
        for name, value in message.headers.items()
        if name != _RETURNS_HEADER and not name.startswith(_BROKER_PREFIX)
    }
    if num_returns:
        headers[_RETURNS_HEADER] = num_returns
    return Message(
        encode(job, message.content_type),
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        headers=headers,
    )


def in_order(job: GenerationJob, message: Message) -> GenerationJob:
    """The job of ``message``, whose runs compare as newer than all before.

    A job for workers with other numerics, or for a conversation's favourite, expires if none of
    them takes it, which brings it here. The broker counts its returns from 0 again, so it is the
    next publication of its request.
    """
    return _next_publication(job) if DEATH_REASON_HEADER in message.headers else job


def published_again(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as the next publication of its request."""
    return as_message(_next_publication(job), message, num_returns)


def _next_publication(job: GenerationJob) -> GenerationJob:
    return msgspec.structs.replace(job, publication=job.publication + 1)


def num_returns_before(message: Message) -> int:
    """How often the messages were returned that a worker's message replaces."""
    num = message.headers.get(_RETURNS_HEADER, 0)
    return max(0, num) if isinstance(num, int) else 0


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
    """Lets one job run while nothing else runs in the worker.

    A queue of such jobs does not starve the others: after each of them, the others run for as long
    as it took, or until there are none.
    """

    def __init__(self, *others: Sequence[Pausable]) -> None:
        """``others`` are groups of consumers; each group is paused once those before it are
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
