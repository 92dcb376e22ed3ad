"""Quarantine: jobs that were running when workers crashed run alone, so that no other job is at
risk."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Protocol

import msgspec

from shared import topology
from shared.bus.base import Message
from shared.log.attempt import MAX_CRASHES
from shared.messages import GenerationJob, encode, seconds_left

MAX_RETURNS = 8
"""Maximum number of returns of a stream, whatever its log says about crashes. Returns include
hand-overs, lost connections, and workers that crashed before they wrote an event or because of
another job while this one waited in quarantine. It is well below the delivery limit of the queues,
at which a job is dead-lettered without an answer to its reader."""
LAST_RETURNS = topology.JOBS_DELIVERY_LIMIT - 4
"""From so many returns on, a job that could not be moved out of its queue fails. The returns that
remain until the delivery limit are for publishing that failure, which may take several attempts."""


def is_returned_too_often(job: GenerationJob, num_returns: int, *, is_suspect: bool) -> bool:
    """Whether the number of returns alone is enough to quarantine or dead-letter a job.

    A job of mode ``final`` has no log. In quarantine it is allowed one more return, because the job
    that it waits for may crash `MAX_CRASHES` workers before it is quarantined itself.
    """
    limit = MAX_CRASHES + is_suspect if job.mode == "final" else MAX_RETURNS
    return num_returns >= limit


def published_again(job: GenerationJob, message: Message) -> Message:
    """The job as a new message: its returns are counted from 0, everything else is unchanged."""
    again = msgspec.structs.replace(job, publication=job.publication + 1)
    return Message(
        encode(again, message.content_type),
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expires_s=seconds_left(job),
        headers=message.headers,
    )


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
    """Lets one job run while nothing else runs in the worker."""

    def __init__(self, *others: Sequence[Pausable]) -> None:
        """``others`` are groups of consumers; each group is paused once those before it are
        idle."""
        self._others = others

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Pause the other consumers and wait until they are idle; they resume when this is left."""
        try:
            for group in self._others:
                for other in group:
                    await other.pause()
                await asyncio.gather(*(other.wait_idle() for other in group))
            yield
        finally:
            for other in chain.from_iterable(self._others):
                other.resume()
