"""Commands that reach a gateway past what the broker checks, with the shipped permissions."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiormq
import pytest
from aiormq.abc import AbstractChannel
from pamqp.commands import Basic
from pamqp.common import Arguments

from gateway.store.batches import BATCH_PREFIX
from gateway.wiring import Gateway, listening
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.errors import Unroutable
from shared.messages import Failed, Release, encode
from shared.settings import GatewaySettings
from tests.support.deployment.broker import Broker
from tests.support.gateway.http import eventually

pytestmark = pytest.mark.rabbit

RELEASE = encode(Release(request_id=f"{BATCH_PREFIX}x", is_cancelled=True, reader="r", tenant=""))
"""What sets `Gateway.batches_changed`."""


class Heard:
    """A gateway, and the messages in its queue of commands."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.messages: list[Message] = []

    def obey(self, message: Message) -> None:
        self.messages.append(message)
        self.gateway.obey(message)


@pytest.fixture
async def heard(broker: Broker, tmp_path: Path) -> AsyncIterator[Heard]:
    chosen = settings.load(GatewaySettings, data_dir=tmp_path)
    async with RabbitBus(broker.url_of("gateway")) as bus:
        heard = Heard(Gateway.build(chosen, bus))
        async with listening(bus, lambda _: None, heard.obey):
            probe = Release(request_id="probe", is_cancelled=False, reader="r", tenant="")

            async def is_listening() -> bool:
                with suppress(Unroutable):
                    await bus.publish(topology.ALL_GATEWAYS, Message(encode(probe)))
                return bool(heard.messages)

            await eventually(is_listening)
            yield heard


@asynccontextmanager
async def publishers_channel(broker: Broker) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(broker.url_of("publisher"))
    try:
        yield await connection.channel()
    finally:
        await connection.close()


@pytest.mark.parametrize("user_id", ["publisher", None])
async def test_a_publishers_command_with_a_second_key_has_no_effect(
    broker: Broker, heard: Heard, caplog: pytest.LogCaptureFixture, user_id: str | None
) -> None:
    async def is_dropped() -> bool:
        return "unauthorized command dropped" in caplog.messages

    async with publishers_channel(broker) as channel:
        try:
            await channel.basic_publish(
                RELEASE,
                exchange=topology.CONTROL.name,
                routing_key="worker.x",
                properties=Basic.Properties(user_id=user_id, headers={"CC": ["gateways"]}),
            )
        except aiormq.exceptions.ChannelAccessRefused:
            is_passed_on = False  # RabbitMQ 4 checks these keys itself
        else:
            is_passed_on = True
            await eventually(is_dropped)

    assert (RELEASE in [message.body for message in heard.messages]) == is_passed_on
    assert not heard.gateway.batches_changed.is_set()


async def test_a_dead_letter_is_no_command(
    broker: Broker, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher can pass on only what workers write into its logs, in the worker's name."""
    name = topology.reply_key(f"publisher.{uuid.uuid4().hex}")
    event = encode(Failed(code="internal_error", message="x"))
    async with publishers_channel(broker) as channel, RabbitBus(broker.url_of("worker")) as worker:
        arguments: Arguments = {
            "x-dead-letter-exchange": topology.CONTROL.name,
            "x-dead-letter-routing-key": "gateways",
            "x-message-ttl": 0,
        }
        await channel.queue_declare(name, exclusive=True, arguments=arguments)
        await channel.queue_bind(name, topology.REPLIES.name, name)
        await worker.publish(topology.reply_binding(name), Message(event))

        async def has_arrived() -> bool:
            return event in [message.body for message in heard.messages]

        await eventually(has_arrived)

    assert "undecodable message dropped" in caplog.messages
    assert not heard.gateway.batches_changed.is_set()
    await heard.gateway.bus.publish(topology.ALL_GATEWAYS, Message(RELEASE))
    await heard.gateway.batches_changed.wait()
