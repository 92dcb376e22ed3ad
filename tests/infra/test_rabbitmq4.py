"""RabbitMQ 4 as `make test BROKER=4` runs it, with the store and the refusals of later versions."""

import os

import aio_pika
import aiormq
import pytest

from tests.support.deployment.broker import ROOT_VARIABLE, RabbitNode

pytestmark = [
    pytest.mark.rabbit,
    pytest.mark.breaks_broker,
    pytest.mark.skipif(ROOT_VARIABLE not in os.environ, reason="RabbitMQ 4 is not asked for"),
]


async def test_metadata_is_kept_in_khepri(own_broker: RabbitNode) -> None:
    assert "khepri_db\tenabled" in own_broker.ctl("--silent", "list_feature_flags")


async def test_queues_that_are_neither_durable_nor_exclusive_are_refused(
    own_broker: RabbitNode,
) -> None:
    async with await aio_pika.connect(own_broker.url) as connection:
        channel = await connection.channel()
        with pytest.raises(aiormq.exceptions.ConnectionInternalError, match="is deprecated"):
            await channel.declare_queue("reply.test", durable=False)
