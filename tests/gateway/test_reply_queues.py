"""Reply queues that are there before their request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.reply_queues import ReplyQueues
from shared import topology
from shared.bus.base import Exchange, Queue
from shared.bus.memory import MemoryBus


@asynccontextmanager
async def kept(bus: MemoryBus, retention_s: float) -> AsyncIterator[ReplyQueues]:
    queues = ReplyQueues(bus, retention_s)
    keeping = asyncio.create_task(queues.keep_spares())
    try:
        yield queues
    finally:
        keeping.cancel()


async def exists(bus: MemoryBus, request_id: str) -> bool:
    return await bus.inspect(topology.reply_queue(request_id, 1).name) is not None


async def test_an_id_tells_its_kind_and_is_given_out_once() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        first = queues.new_id("cmpl")
        await asyncio.sleep(0.3)
        ids = [first, *(queues.new_id("cmpl") for _ in range(40))]

    assert len(set(ids)) == len(ids)
    assert {request_id.split("-")[0] for request_id in ids} == {"cmpl"}


async def test_later_requests_find_their_queue_declared() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        first = queues.new_id("cmpl")
        was_there_at_first = await exists(bus, first)
        await asyncio.sleep(0.3)
        is_there = await exists(bus, queues.new_id("cmpl"))

    assert (was_there_at_first, is_there) == (False, True)


async def test_a_declared_queue_exists_whether_it_was_spare_or_not() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        for _ in range(2):
            request_id = queues.new_id("cmpl")
            queue = await queues.declare(request_id)
            assert await exists(bus, request_id)
            assert queue.name == topology.reply_queue(request_id, 60).name
            await asyncio.sleep(0.3)


class SlowBus(MemoryBus):
    async def declare(self, *resources: Exchange | Queue) -> None:
        await asyncio.sleep(0.005)
        await super().declare(*resources)


async def test_both_kinds_of_ids_get_spares_though_one_is_first_asked_for_meanwhile() -> None:
    async with SlowBus() as bus, kept(bus, retention_s=60) as queues:
        queues.new_id("chatcmpl")
        await asyncio.sleep(0.11)
        queues.new_id("cmpl")
        await asyncio.sleep(0.4)

        assert await exists(bus, queues.new_id("chatcmpl"))
        assert await exists(bus, queues.new_id("cmpl"))


async def test_a_spare_queue_that_is_about_to_expire_is_not_used() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=0.4) as queues:
        queues.new_id("cmpl")
        await asyncio.sleep(0.7)
        request_id = queues.new_id("cmpl")
        await queues.declare(request_id)

        assert await exists(bus, request_id)


async def test_spares_are_declared_again_after_the_connection_was_lost() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        bus.sever()
        queues.new_id("cmpl")
        await asyncio.sleep(1.5)

        assert await exists(bus, queues.new_id("cmpl"))
