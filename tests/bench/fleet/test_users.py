"""Users against a gateway and a synthetic worker in the test's own process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.fleet.users import FleetUsers, users
from shared.bus.memory import MemoryBroker
from tests.support.gateway.http import live_gateway
from tests.support.workers.synthetic import echo_worker

TOKENS = 4


@asynccontextmanager
async def asking(num_users: int, step_s: float = 0.01) -> AsyncIterator[FleetUsers]:
    broker = MemoryBroker()
    async with (
        echo_worker(broker, step_s=step_s, max_num_seqs=8),
        live_gateway(broker) as gateway,
        users([gateway.url], TOKENS) as load,
    ):
        load.add(num_users)
        yield load


async def test_rates_count_answers_and_their_tokens() -> None:
    async with asking(num_users=3) as load:
        received = await load.measure(1.0)

    assert received.requests_per_s > 0
    assert received.events_per_s > 0
    assert received.tokens_per_s >= received.events_per_s  # an event has at least one token
    assert received.ttft_p50_ms > 0


async def test_a_measurement_lasts_until_there_is_an_answer() -> None:
    async with asking(num_users=1, step_s=0.05) as load:
        received = await load.measure(0)

    assert received.requests_per_s > 0


async def test_the_failure_of_a_user_is_not_lost() -> None:
    async with users(["http://127.0.0.1:1"], TOKENS) as load:
        load.add(1)
        with pytest.raises(OSError, match="Connect"):
            await load.measure(0)
