"""Turns: whose is next."""

import asyncio
import gc
import threading

import pytest

from shared.errors import Overloaded
from shared.turns import TenantThreads, Turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def ended(turns: Turns, wanted: list[str], costs: dict[str, float]) -> list[str]:
    """The tenants in the order in which they have turns, after they have all asked at once."""
    order: list[str] = []

    async def work(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turns.leave(tenant, costs[tenant])

    await asyncio.gather(*(work(tenant) for tenant in wanted))
    return order


async def test_a_costly_tenant_waits_for_the_others(clock: Clock) -> None:
    order = await ended(
        Turns(clock=clock), ["m"] * 4 + ["a", "a", "b"], {"m": 1, "a": 0.1, "b": 0.1}
    )

    assert order == ["m", "a", "b", "a", "m", "m", "m"]


async def test_old_costs_are_forgotten(clock: Clock) -> None:
    turns = Turns(clock=clock)
    await ended(turns, ["m", "a"], {"m": 8, "a": 1})

    clock.now += 150  # an eighth of a second is less than what bob uses first
    order = await ended(turns, ["b", "b", "m"], {"m": 1, "b": 1})

    assert order == ["b", "m", "b"]


@pytest.mark.parametrize(("tenant", "num_held"), [("a", 1), ("", 2)])
async def test_a_tenant_holds_one_place_and_the_anonymous_one_all(
    tenant: str, num_held: int, clock: Clock
) -> None:
    turns = Turns(2, clock=clock)
    taking = [asyncio.create_task(turns.take(tenant)) for _ in range(3)]
    await asyncio.sleep(0)

    assert sum(one.done() for one in taking) == num_held

    for _ in range(2):
        turns.leave(tenant, 1.0)
        await asyncio.sleep(0)
    await asyncio.gather(*taking)


async def test_a_turn_whose_wait_fails_is_left_out(clock: Clock) -> None:
    turns = Turns(clock=clock)
    await turns.take("a")
    waiting = turns.take("b")
    waiting.send(None)
    with pytest.raises(ValueError, match="unforeseen"):
        waiting.throw(ValueError("unforeseen"))

    turns.leave("a", 1.0)

    await turns.take("b")


async def test_a_cancelled_turn_is_left_out(clock: Clock) -> None:
    turns = Turns(clock=clock)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take(name)) for name in ("b", "c")]
    await asyncio.sleep(0)

    waiting[0].cancel()
    turns.leave("a", 1)

    await waiting[1]
    turns.leave("c", 1)
    await turns.take("d")


async def test_too_many_turns_of_a_tenant_are_refused(clock: Clock) -> None:
    turns = Turns(clock=clock)
    await turns.take("m")
    waiting = [asyncio.create_task(turns.take("m")) for _ in range(1_000)]
    await asyncio.sleep(0)

    with pytest.raises(Overloaded):
        await turns.take("m")

    for task in waiting:
        task.cancel()


async def test_a_tenant_holds_one_of_several_places(clock: Clock) -> None:
    turns = Turns(3, clock=clock)
    await turns.take("m")
    second = asyncio.create_task(turns.take("m"))

    await turns.take("a")
    await turns.take("b")

    assert not second.done()
    turns.leave("m", 1)
    await second


async def test_a_turn_that_was_given_and_cancelled_at_once_is_passed_on(clock: Clock) -> None:
    turns = Turns(clock=clock)
    await turns.take("a")
    waiting = asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)

    turns.leave("a", 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await turns.take("b")


async def test_work_whose_turn_does_not_come_in_time_is_refused() -> None:
    threads, may_end = TenantThreads(1, "test"), threading.Event()
    first = asyncio.create_task(threads.run("a", may_end.wait))
    await asyncio.sleep(0)

    with pytest.raises(Overloaded):
        await threads.run("b", may_end.wait, max_wait_s=0.01)

    may_end.set()
    assert await first
    assert await threads.run("b", may_end.wait)


async def test_the_error_of_work_whose_request_was_cancelled_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, may_end = TenantThreads(1, "test"), threading.Event()

    def fail() -> None:
        may_end.wait()
        raise ValueError

    asked = asyncio.create_task(threads.run("a", fail))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    may_end.set()
    await threads.run("a", lambda: None)
    del asked  # whose error refers to the work
    gc.collect()

    assert caplog.records == []
