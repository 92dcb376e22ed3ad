"""A job whose request is over is still in its queue when a client repeats the Idempotency-Key."""

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import eventually, live_gateway
from tests.support.workers.synthetic import echo_worker
from tests.system.test_lost_nodes import asking, log_of, undisturbed, words_of

KEY = "order-66"
OTHER = "quite another question"


@pytest.mark.parametrize("has_expired", [True, False])
async def test_the_request_is_answered_and_not_the_one_before_it(has_expired: bool) -> None:
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        live_gateway(bus, first_event_timeout_s=0.05, disconnect_grace_s=0.05) as gateway,
    ):
        expected = await undisturbed(broker, gateway, prompt=OTHER)
        async with asking(gateway, KEY, timeout=0.2 if has_expired else 60) as response:
            log = log_of(response)
            if has_expired:
                await response.aread()

        async def is_gone() -> bool:
            return await bus.inspect(log) is None

        await eventually(is_gone)
        async with (
            asking(gateway, KEY, prompt=OTHER) as response,
            echo_worker(broker),
        ):
            body = (await response.aread()).decode()

    assert words_of(body) == words_of(expected)
