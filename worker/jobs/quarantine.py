"""Quarantine: jobs that were running when workers crashed run alone, so that no other job is at
risk."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Protocol

import msgspec

from shared.bus.base import Message
from shared.messages import GenerationJob, encode

_RETURNS_HEADER = "warren-returns"
"""How often the messages were returned that a message replaces, for a job without a log."""


def as_message(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as a new message in place of ``message``, whose returns are counted from
    ``num_returns``."""
    headers = {name: value for name, value in message.headers.items() if name != _RETURNS_HEADER}
    if num_returns:
        headers[_RETURNS_HEADER] = num_returns
    return Message(
        encode(job, message.content_type),
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        headers=headers,
    )


def published_again(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as the next publication of its request."""
    again = msgspec.structs.replace(job, publication=job.publication + 1)
    return as_message(again, message, num_returns)


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
