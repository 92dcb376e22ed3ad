"""Channels that are kept open and reused."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiormq import Channel
from pamqp.commands import Channel as ChannelMethods

from shared.bus.rabbit.failures import AMQP_FAILURES
from shared.bus.rabbit.link import Link
from shared.errors import BusUnavailable

_MAX_CALLS = 16
_SUCCESS = 200


async def close_channel(channel: Channel) -> None:
    """Close a channel, however long the broker takes to answer.

    `Channel.close` gives up after a heartbeat and asks again, and for the second time the broker
    ends the connection.
    """
    with suppress(*AMQP_FAILURES):
        await channel.rpc(ChannelMethods.Close(_SUCCESS, "", 0, 0))


class ConfirmChannels:
    """The channels for publishing, used round-robin.

    Any number of publishes can await their confirmations on one channel. There are several channels
    because an error closes a channel with everything in flight on it.
    """

    def __init__(self, link: Link, num_channels: int) -> None:
        self._link = link
        self._channels: list[Channel | None] = [None] * num_channels
        self._locks = [asyncio.Lock() for _ in range(num_channels)]
        self._turns = itertools.cycle(range(num_channels))

    async def take(self) -> Channel:
        """Return an open channel. Raises `BusUnavailable`, also while the broker reads nothing that
        is published because it is short of memory or disk space."""
        await self._link.wait_writable()
        turn = next(self._turns)
        channel = self._channels[turn]
        if channel is not None and not channel.is_closed:
            return channel
        return await self._link.calls.run(self._open(turn), "open a channel")

    async def _open(self, turn: int) -> Channel:
        async with self._locks[turn]:
            channel = self._channels[turn]
            if channel is None or channel.is_closed:
                channel = await self._link.open_channel(confirms=True)
                self._channels[turn] = channel
            return channel


class CallChannels:
    """The channels for synchronous calls, each lent to one caller at a time."""

    def __init__(self, open_channel: Callable[[], Awaitable[Channel]], timeout_s: float) -> None:
        """``timeout_s`` limits the wait until one of them is free."""
        self._open_channel = open_channel
        self._timeout_s = timeout_s
        self._idle: list[Channel] = []
        self._places = asyncio.Semaphore(_MAX_CALLS)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Channel]:
        """Lend a channel. After a failed call the channel is closed: an answer that arrives late
        must not be taken for the next call's.

        Raises `BusUnavailable` if all channels are in use for too long, so that calls that wait for
        a silent broker do not accumulate.
        """
        async with self._place():
            channel = self._take_idle() or await self._open_channel()
            try:
                yield channel
            except BaseException:
                await close_channel(channel)
                raise
            self._idle.append(channel)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise BusUnavailable("the broker does not answer earlier calls") from None
        try:
            yield
        finally:
            self._places.release()

    def _take_idle(self) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        return None
