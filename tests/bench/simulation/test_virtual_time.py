"""The event loop that jumps from timer to timer."""

import asyncio
import time

import pytest

from bench.simulation.virtual_time import VirtualTimeLoop


async def _nap(order: list[str], name: str, seconds: float) -> float:
    await asyncio.sleep(seconds)
    order.append(name)
    return asyncio.get_running_loop().time()


async def _two_naps(order: list[str]) -> tuple[float, float]:
    return await asyncio.gather(_nap(order, "long", 7200), _nap(order, "short", 3600))


def test_hours_of_sleep_take_no_time_and_end_in_order() -> None:
    order: list[str] = []
    began = time.process_time()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        ended_at = runner.run(_two_naps(order))

    assert order == ["short", "long"]
    assert ended_at == pytest.approx((7200, 3600))
    assert time.process_time() - began < 60


def test_waiting_for_nothing_is_an_error() -> None:
    with (
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
        pytest.raises(RuntimeError, match="no timer"),
    ):
        runner.run(_forever())


async def _forever() -> None:
    await asyncio.Event().wait()
