"""Turns: whose is next."""

import asyncio

import pytest

from shared.errors import Overloaded
from shared.grammars.turns import Turns


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
    order = await ended(Turns(clock), ["m"] * 4 + ["a", "a", "b"], {"m": 1, "a": 0.1, "b": 0.1})

    assert order == ["m", "a", "b", "a", "m", "m", "m"]


async def test_old_costs_are_forgotten(clock: Clock) -> None:
    turns = Turns(clock)
    await ended(turns, ["m", "a"], {"m": 8, "a": 1})

    clock.now += 150  # an eighth of a second is less than what bob uses first
    order = await ended(turns, ["b", "b", "m"], {"m": 1, "b": 1})

    assert order == ["b", "m", "b"]


async def test_a_cancelled_turn_is_left_out(clock: Clock) -> None:
    turns = Turns(clock)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take(name)) for name in ("b", "c")]
    await asyncio.sleep(0)

    waiting[0].cancel()
    turns.leave("a", 1)

    await waiting[1]
    turns.leave("c", 1)
    await turns.take("d")


async def test_too_many_turns_of_a_tenant_are_refused(clock: Clock) -> None:
    turns = Turns(clock)
    await turns.take("m")
    waiting = [asyncio.create_task(turns.take("m")) for _ in range(1_000)]
    await asyncio.sleep(0)

    with pytest.raises(Overloaded):
        await turns.take("m")

    for task in waiting:
        task.cancel()
