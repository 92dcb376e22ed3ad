"""Reply queues that are there before their request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.log.reply_queues import ReplyLog, ReplyQueues
from shared import topology
from shared.bus.base import Exchange, Message, Queue
from shared.bus.memory import MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from tests.support.gateway.http import eventually

NUM_SPARE = 8


class CountingBus(MemoryBus):
    """Counts the logs that are being read."""

    num_read = 0

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as consumer:
            self.num_read += 1
            try:
                yield consumer
            finally:
                self.num_read -= 1

    async def wait_until_read(self, num_logs: int = NUM_SPARE) -> None:
        async def are_read() -> bool:
            return self.num_read == num_logs

        await eventually(are_read)


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
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        first = taken(queues).request_id
        await bus.wait_until_read()
        ids = [first, *(taken(queues).request_id for _ in range(40))]

    assert len(set(ids)) == len(ids)
    assert {request_id.split("-")[0] for request_id in ids} == {"cmpl"}
    assert {len(bytes.fromhex(request_id.split("-")[1])) for request_id in ids} == {16}


async def test_later_requests_find_their_queue_with_its_reader() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        at_first = await num_readers(bus, taken(queues).request_id)
        await bus.wait_until_read()
        later = await num_readers(bus, taken(queues).request_id)

    assert (at_first, later) == (None, 1)


async def test_a_log_is_read_from_its_start_and_again_whether_it_was_spare_or_not() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        for is_spare in (False, True):
            log = taken(queues)
            await log.declare()
            assert log.is_attached == is_spare
            await bus.publish(log.queue.bindings[0], Message(b"first"))
            for _ in range(2):
                assert (await anext(await log.attach())).message.body == b"first"
                await log.close()
                assert await num_readers(bus, log.request_id) == 0
            await bus.wait_until_read()


class SlowBus(CountingBus):
    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()
        """Whether anything was to be declared."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        self.has_begun.set()
        await asyncio.sleep(0.005)
        await super().declare(*resources)


async def test_both_kinds_of_ids_get_spares_though_one_is_first_asked_for_meanwhile() -> None:
    async with SlowBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues, "chatcmpl-")
        await bus.has_begun.wait()
        taken(queues)
        await bus.wait_until_read(2 * NUM_SPARE)

        assert await num_readers(bus, taken(queues, "chatcmpl-").request_id) == 1
        assert await num_readers(bus, taken(queues).request_id) == 1


async def test_a_spare_queue_does_not_expire_while_it_waits() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=0.2) as queues:
        taken(queues)
        await bus.wait_until_read()
        await asyncio.sleep(0.7)

        assert await num_readers(bus, taken(queues).request_id) == 1


async def test_spares_that_lost_their_connection_are_not_given_out() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues)
        await bus.wait_until_read()
        bus.sever()
        await bus.wait_connected()
        log = taken(queues)

        assert await num_readers(bus, log.request_id) is None
        assert not log.is_attached


async def test_the_log_of_a_request_that_was_refused_becomes_anothers() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        taken(queues)
        await bus.wait_until_read()
        spare = [taken(queues).request_id for _ in range(7)]
        with queues.take("cmpl-") as refused:
            pass

        assert taken(queues) is refused
        assert refused.request_id not in spare


async def test_spares_are_declared_again_after_the_connection_was_lost() -> None:
    async with CountingBus() as bus, kept(bus, retention_s=60) as queues:
        bus.sever()
        taken(queues)
        await bus.wait_until_read()

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
