"""Reply queues that are there before their request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.log.reply_queues import ReplyQueues
from shared import topology
from shared.bus.base import Exchange, Message, Queue
from shared.bus.memory import MemoryBus


@asynccontextmanager
async def kept(
    bus: MemoryBus, retention_s: float, unused_s: float = 5.0
) -> AsyncIterator[ReplyQueues]:
    queues = ReplyQueues(bus, retention_s, unused_s)
    keeping = asyncio.create_task(queues.keep_spares())
    try:
        yield queues
    finally:
        keeping.cancel()


async def num_readers(bus: MemoryBus, request_id: str) -> int | None:
    """None: there is no such queue."""
    state = await bus.inspect(topology.reply_queue(request_id, 1).name)
    return None if state is None else state.num_consumers


async def test_an_id_tells_its_kind_and_is_given_out_once() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        first = queues.new_id("cmpl")
        await asyncio.sleep(0.3)
        ids = [first, *(queues.new_id("cmpl") for _ in range(40))]

    assert len(set(ids)) == len(ids)
    assert {request_id.split("-")[0] for request_id in ids} == {"cmpl"}


async def test_later_requests_find_their_queue_with_its_reader() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        at_first = await num_readers(bus, queues.new_id("cmpl"))
        await asyncio.sleep(0.3)
        later = await num_readers(bus, queues.new_id("cmpl"))

    assert (at_first, later) == (None, 1)


async def test_a_log_is_read_from_its_start_and_again_whether_it_was_spare_or_not() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        for is_spare in (False, True):
            request_id = queues.new_id("cmpl")
            log = await queues.take(request_id)
            assert log.is_attached == is_spare
            await bus.publish(log.queue.bindings[0], Message(b"first"))
            for _ in range(2):
                assert (await anext(await log.attach())).message.body == b"first"
                await log.close()
                assert await num_readers(bus, request_id) == 0
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
        await asyncio.sleep(1)

        assert await num_readers(bus, queues.new_id("chatcmpl")) == 1
        assert await num_readers(bus, queues.new_id("cmpl")) == 1


async def test_a_spare_queue_does_not_expire_while_it_waits() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=0.2) as queues:
        queues.new_id("cmpl")
        await asyncio.sleep(0.7)

        assert await num_readers(bus, queues.new_id("cmpl")) == 1


async def test_spares_that_lost_their_connection_are_not_given_out() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        queues.new_id("cmpl")
        await asyncio.sleep(0.3)
        bus.sever()
        await bus.wait_connected()
        request_id = queues.new_id("cmpl")

        assert await num_readers(bus, request_id) is None
        assert not (await queues.take(request_id)).is_attached


async def test_the_log_of_a_request_that_was_refused_is_given_back() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60, unused_s=0.1) as queues:
        queues.new_id("cmpl")
        await asyncio.sleep(0.3)
        refused = queues.new_id("cmpl")
        assert await num_readers(bus, refused) == 1
        await asyncio.sleep(0.3)
        queues.new_id("cmpl")
        await asyncio.sleep(0.3)

        assert await num_readers(bus, refused) == 0


async def test_spares_are_declared_again_after_the_connection_was_lost() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        bus.sever()
        queues.new_id("cmpl")
        await asyncio.sleep(1.5)

        assert await num_readers(bus, queues.new_id("cmpl")) == 1
