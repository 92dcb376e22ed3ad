"""Existing logs are relayed again, while they are there."""

import pytest

from gateway.fleet.live_workers import Backlog, LiveWorkers
from gateway.log.registry import Relays
from gateway.log.reply_queues import ReplyQueues
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.errors import StreamExpired
from shared.settings import GatewaySettings


async def test_a_log_that_is_deleted_before_its_reader_marks_its_end_has_expired(
    bus: MemoryBus,
) -> None:
    chosen = settings.load(GatewaySettings)
    workers = LiveWorkers(bus, Backlog(bus, 60), has_affinity=True)
    relays = Relays(bus, ReplyQueues(bus, 60), workers, chosen, silence_s=8)

    with pytest.raises(StreamExpired):
        async with relays.resume("resp_deleted", "acme") as relay:
            await bus.publish(topology.reply_binding(relay.log_name), Message(b"mark"))


async def test_a_cancelled_log_is_gone_when_the_cancellation_returns(bus: MemoryBus) -> None:
    chosen = settings.load(GatewaySettings)
    workers = LiveWorkers(bus, Backlog(bus, 60), has_affinity=True)
    logs = ReplyQueues(bus, 60)
    relays = Relays(bus, logs, workers, chosen, silence_s=8)
    log = logs.named("resp_cancelled")
    await log.declare()

    await relays.cancel("resp_cancelled", None)

    assert await bus.inspect(log.queue.name) is None
