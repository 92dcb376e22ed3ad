"""Logs that already exist when a request with an Idempotency-Key arrives."""

import pytest

from gateway.log.reply_queues import ReplyQueues
from shared import topology
from shared.bus.base import Message, Queue
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.broker import Broker

pytestmark = pytest.mark.rabbit


async def test_a_log_whose_declaration_was_cut_off_is_bound_by_who_asks_again(
    broker: Broker,
) -> None:
    log = topology.reply_queue("cmpl-cut-off", 60)
    async with RabbitBus(broker.url_of("gateway")) as bus:
        await bus.declare(topology.REPLIES, Queue(log.name, expires_s=log.expires_s))
        await ReplyQueues(bus, retention_s=60).named("cmpl-cut-off", may_exist=True).declare()
        await bus.publish(log.bindings[0], Message(b""))
        state = await bus.inspect(log.name)
        await bus.delete_queue(log.name)

    assert state is not None
    assert state.num_ready == 1


async def test_a_log_that_was_made_to_last_longer_stays_as_it_is(broker: Broker) -> None:
    log = topology.reply_queue("cmpl-lasting", 600)
    async with RabbitBus(broker.url_of("gateway")) as bus:
        await bus.declare(log)
        taken = ReplyQueues(bus, retention_s=60).named("cmpl-lasting", may_exist=True)
        await taken.declare()
        async with bus.consume(taken.queue.name):
            pass
        await bus.delete_queue(log.name)
