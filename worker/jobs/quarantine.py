"""Jobs that were running when workers died: they run alone, where they harm nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Protocol

import msgspec

from shared.bus.base import Message
from shared.log.attempt import MAX_CRASHES
from shared.messages import GenerationJob, encode

MAX_RETURNS = 8
"""Deliveries of a stream that came back, whatever its log says of crashes: hand-overs and lost
connections are among them, and so are workers that died before they wrote a word, or of another job
while a suspect waited. Well below the delivery limit of the queues, at which a job dies and nobody
tells its reader."""


def is_returned_too_often(job: GenerationJob, num_returns: int, *, is_suspect: bool) -> bool:
    """Whether the deliveries alone condemn a job.

    One of mode ``final`` has no other record: as a suspect it is granted one return more, because
    the job that it waits for may kill `MAX_CRASHES` workers before it is a suspect itself.
    """
    limit = MAX_CRASHES + is_suspect if job.mode == "final" else MAX_RETURNS
    return num_returns >= limit


def published_again(job: GenerationJob, message: Message) -> Message:
    """The job as a new message: its deliveries are counted anew, all else stays."""
    again = msgspec.structs.replace(job, publication=job.publication + 1)
    expires_s = None if job.deadline is None else max(0.001, job.deadline - time.time())
    return Message(
        encode(again, message.content_type),
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expires_s=expires_s,
        headers=message.headers,
    )


class Pausable(Protocol):
    """A consumer of jobs."""

    async def pause(self) -> None:
        """Take no more jobs until `resume`."""
        ...

    async def wait_idle(self) -> None:
        """Return when the jobs in hand are done."""
        ...

    def resume(self) -> None: ...


class Solitude:
    """Lets one job at a time run while nothing else does."""

    def __init__(self, *others: Sequence[Pausable]) -> None:
        """Each of these groups goes on until the ones before it are idle."""
        self._others = others

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait until the jobs of the others have ended; they take none before this is left."""
        try:
            for group in self._others:
                for other in group:
                    await other.pause()
                await asyncio.gather(*(other.wait_idle() for other in group))
            yield
        finally:
            for other in chain.from_iterable(self._others):
                other.resume()
