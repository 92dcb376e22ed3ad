"""Streams whose worker is slow get a second worker, and the fleet little extra work."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from gateway.log import hedging
from gateway.log.hedging import Expectation
from shared.bus.memory import MemoryBroker
from tests.support.engines.brake import Brake
from tests.support.gateway.http import LiveGateway, events, live_gateway
from tests.support.metrics import total
from tests.support.workers.synthetic import echo_worker

NUM_TAUGHT = 24
NUM_TOKENS = 400
"""So many that the gateway looks at each stream several times."""
NUM_FEW_TOKENS = 60
STEP_S = 0.002


@pytest.fixture
async def fleet(broker: MemoryBroker) -> AsyncIterator[AsyncExitStack]:
    """Workers that a test starts; they end with it."""
    async with AsyncExitStack() as stack:
        yield stack


async def ask(gateway: LiveGateway, number: int, num_tokens: int = NUM_TOKENS) -> str:
    body = {
        "model": "echo",
        "prompt": f"Question {number}",
        "max_tokens": num_tokens,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
    }
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer.text)
    assert done == "[DONE]", done
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def hedges(gateway: LiveGateway) -> dict[str, float]:
    text = (await gateway.http.get("/metrics")).text
    name = "warren_gateway_hedges_total"
    return {one: total(text, name, outcome=one) for one in ("won", "lost", "cancelled")}


async def teach(gateway: LiveGateway, num_tokens: int = NUM_TOKENS) -> list[str]:
    """Let a gateway learn what to expect; returns the texts of the answers."""
    return await asyncio.gather(*(ask(gateway, number, num_tokens) for number in range(NUM_TAUGHT)))


@pytest.mark.parametrize("num_steps", [0, 12], ids=["before its first token", "in mid-stream"])
async def test_streams_of_a_worker_that_stands_still_go_on_unchanged(
    broker: MemoryBroker, fleet: AsyncExitStack, num_steps: int
) -> None:
    brake = Brake(num_steps)
    for _ in range(2):
        await fleet.enter_async_context(echo_worker(broker, step_s=STEP_S))
    async with live_gateway(broker) as gateway:
        expected = (await teach(gateway))[:9]
        await fleet.enter_async_context(echo_worker(broker, step_s=STEP_S, brake=brake))

        answers = await asyncio.gather(*(ask(gateway, number) for number in range(9)))

        assert answers == expected
        counted = await hedges(gateway)
        assert counted["won"] >= 1
        brake.release()


async def test_a_worker_that_is_alone_is_not_hedged(
    broker: MemoryBroker, fleet: AsyncExitStack
) -> None:
    brake = Brake(10_000)
    await fleet.enter_async_context(echo_worker(broker, step_s=STEP_S, brake=brake))
    async with live_gateway(broker) as gateway:
        await teach(gateway)

        await asyncio.gather(*(ask(gateway, number, num_tokens=600) for number in range(4)))

        assert sum((await hedges(gateway)).values()) == 0


async def test_streams_are_not_hedged_any_more_once_the_share_of_extra_work_is_used_up(
    broker: MemoryBroker,
    fleet: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "gateway.log.hedging")
    brakes = [Brake(), Brake()]
    for brake in brakes:
        await fleet.enter_async_context(echo_worker(broker, brake=brake))
    async with live_gateway(broker) as gateway:
        taught = brakes[0].allow_until(brakes[1].allow_until(teach(gateway, NUM_FEW_TOKENS)))
        expected = await taught
        monkeypatch.setattr(hedging, "_MOST_ADVANCED", 2.0)
        num_before = num_hedged(caplog)

        asking = [asyncio.create_task(ask(gateway, k, NUM_FEW_TOKENS)) for k in range(8)]
        while num_hedged(caplog) < num_before + 2:  # noqa: ASYNC110 (the gateway tells nobody)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # ten looks at eight streams, all of which stand still
        num_sent = num_hedged(caplog) - num_before
        for brake in brakes:
            brake.release()

        assert num_sent == 2
        assert await asyncio.gather(*asking) == expected[:8]


def num_hedged(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "request hedged" for record in caplog.records)


def test_a_slow_worker_does_not_change_what_is_expected_of_all() -> None:
    times, draw = Expectation(), random.Random(0)
    for _ in range(50):
        for worker in ("a", "b", "c"):
            times.learn(worker, draw.uniform(0.1, 0.2))
        times.learn("slow", draw.uniform(1.0, 2.0))

    expected = times.seconds

    assert expected is not None
    assert 0.1 < expected <= 0.2
    assert [worker for worker in ("a", "b", "c", "slow") if times.is_slow(worker)] == ["slow"]


def test_nothing_is_expected_before_some_times_are_known() -> None:
    times = Expectation()
    times.learn("a", 0.1)

    assert times.seconds is None
    assert not times.is_slow("a")


def test_a_slow_worker_that_is_always_outrun_stays_slow_until_it_is_faster() -> None:
    times = Expectation()
    for _ in range(64):
        times.learn("a", 0.1)
        times.learn("b", 0.1)
        times.learn("slow", 1.0)

    for _ in range(64):
        times.learn_outrun("slow", 0.12)
    was_slow = times.is_slow("slow")
    for _ in range(64):
        times.learn("slow", 0.1)

    assert (was_slow, times.is_slow("slow")) == (True, False)
