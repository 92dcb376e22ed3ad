"""Channels that are kept open and reused."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiormq import Channel

from shared.bus.rabbit.failures import AMQP_FAILURES
from shared.bus.rabbit.link import Link
from shared.bus.rabbit.shielded_calls import Calls

_MAX_CALLS = 16


class ConfirmChannels:
    """The channels for publishing, used round-robin.

    Any number of publishes can await their confirmations on one channel. There are several channels
    because an error closes a channel with everything in flight on it.
    """

    def __init__(self, link: Link, calls: Calls, num_channels: int) -> None:
        self._link = link
        self._calls = calls
        self._channels: list[Channel | None] = [None] * num_channels
        self._locks = [asyncio.Lock() for _ in range(num_channels)]
        self._turns = itertools.cycle(range(num_channels))

    async def take(self) -> Channel:
        """Return an open channel. Raises `BusUnavailable`."""
        turn = next(self._turns)
        channel = self._channels[turn]
        if channel is not None and not channel.is_closed:
            return channel
        return await self._calls.run(self._open(turn), "open a channel")

    async def _open(self, turn: int) -> Channel:
        async with self._locks[turn]:
            channel = self._channels[turn]
            if channel is None or channel.is_closed:
                channel = await self._link.open_channel(confirms=True)
                self._channels[turn] = channel
            return channel


class CallChannels:
    """The channels for synchronous calls, each lent to one caller at a time."""

    def __init__(self, open_channel: Callable[[], Awaitable[Channel]]) -> None:
        self._open_channel = open_channel
        self._idle: list[Channel] = []
        self._places = asyncio.Semaphore(_MAX_CALLS)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Channel]:
        """Lend a channel. After a failed call the channel is closed: an answer that arrives late
        must not be taken for the next call's."""
        async with self._places:
            channel = self._take_idle() or await self._open_channel()
            try:
                yield channel
            except BaseException:
                with suppress(*AMQP_FAILURES):
                    await channel.close()
                raise
            self._idle.append(channel)

    def _take_idle(self) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        return None
