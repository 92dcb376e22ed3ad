"""Reply queues that are there before their request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.log.reply_queues import ReplyLog, ReplyQueues
from shared import topology
from shared.bus.base import Exchange, Message, Queue
from shared.bus.memory import MemoryBus


@asynccontextmanager
async def kept(bus: MemoryBus, retention_s: float) -> AsyncIterator[ReplyQueues]:
    queues = ReplyQueues(bus, retention_s)
    keeping = asyncio.create_task(queues.keep_spares())
    try:
        yield queues
    finally:
        keeping.cancel()


def taken(queues: ReplyQueues, prefix: str = "cmpl-") -> ReplyLog:
    """The log of a request that uses it."""
    with queues.take(prefix) as log:
        log.is_used = True
        return log


async def num_readers(bus: MemoryBus, request_id: str) -> int | None:
    """None: there is no such queue."""
    state = await bus.inspect(topology.reply_queue(request_id, 1).name)
    return None if state is None else state.num_consumers


async def test_an_id_shows_its_kind_and_is_given_out_once() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        first = taken(queues).request_id
        await asyncio.sleep(0.3)
        ids = [first, *(taken(queues).request_id for _ in range(40))]

    assert len(set(ids)) == len(ids)
    assert {request_id.split("-")[0] for request_id in ids} == {"cmpl"}
    assert {len(bytes.fromhex(request_id.split("-")[1])) for request_id in ids} == {16}


async def test_later_requests_find_their_queue_with_its_reader() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        at_first = await num_readers(bus, taken(queues).request_id)
        await asyncio.sleep(0.3)
        later = await num_readers(bus, taken(queues).request_id)

    assert (at_first, later) == (None, 1)


async def test_a_log_is_read_from_its_start_and_again_whether_it_was_spare_or_not() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        for is_spare in (False, True):
            log = taken(queues)
            await log.declare()
            assert log.is_attached == is_spare
            await bus.publish(log.queue.bindings[0], Message(b"first"))
            for _ in range(2):
                assert (await anext(await log.attach())).message.body == b"first"
                await log.close()
                assert await num_readers(bus, log.request_id) == 0
            await asyncio.sleep(0.3)


class SlowBus(MemoryBus):
    async def declare(self, *resources: Exchange | Queue) -> None:
        await asyncio.sleep(0.005)
        await super().declare(*resources)


async def test_both_kinds_of_ids_get_spares_though_one_is_first_asked_for_meanwhile() -> None:
    async with SlowBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues, "chatcmpl-")
        await asyncio.sleep(0.11)
        taken(queues)
        await asyncio.sleep(1)

        assert await num_readers(bus, taken(queues, "chatcmpl-").request_id) == 1
        assert await num_readers(bus, taken(queues).request_id) == 1


async def test_a_spare_queue_does_not_expire_while_it_waits() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=0.2) as queues:
        taken(queues)
        await asyncio.sleep(0.7)

        assert await num_readers(bus, taken(queues).request_id) == 1


async def test_spares_that_lost_their_connection_are_not_given_out() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues)
        await asyncio.sleep(0.3)
        bus.sever()
        await bus.wait_connected()
        log = taken(queues)

        assert await num_readers(bus, log.request_id) is None
        assert not log.is_attached


async def test_the_log_of_a_request_that_was_refused_becomes_anothers() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues)
        await asyncio.sleep(0.3)
        spare = [taken(queues).request_id for _ in range(7)]
        with queues.take("cmpl-") as refused:
            pass

        assert taken(queues) is refused
        assert refused.request_id not in spare


async def test_spares_are_declared_again_after_the_connection_was_lost() -> None:
    async with MemoryBus() as bus, kept(bus, retention_s=60) as queues:
        bus.sever()
        taken(queues)
        await asyncio.sleep(1.5)

        assert await num_readers(bus, taken(queues).request_id) == 1


async def test_a_log_is_deleted_with_all_before_it() -> None:
    async with MemoryBus() as bus:
        await bus.declare(topology.REPLIES)
        log = ReplyLog(bus, "r", retention_s=60)
        names = []
        for _ in range(3):
            await log.declare()
            names.append(log.queue.name)
            log.move_on()
        await log.declare()

        await log.delete()

        left = [name for name in names if await bus.inspect(name) is not None]
    assert left == []
