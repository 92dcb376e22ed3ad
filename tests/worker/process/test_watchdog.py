"""A worker that hangs is ended, and no other."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shared.bus.memory import MemoryBus
from shared.messages import SamplingParams
from tests.support.workers.jobs import ask, new_job
from tests.support.workers.synthetic import echo_worker
from worker.model import echo
from worker.process.watchdog import Watchdog

TIMEOUT_S = 0.4


class Engine:
    """Says that it has been at a step since ``busy_since``."""

    def __init__(self) -> None:
        self.busy_since: float | None = None

    def stalled_s(self) -> float:
        return 0.0 if self.busy_since is None else time.monotonic() - self.busy_since


@pytest.fixture
def ended() -> list[float]:
    """When the process would have been ended."""
    return []


async def test_an_engine_that_ends_no_step_is_noticed(ended: list[float]) -> None:
    engine = Engine()
    with Watchdog(engine.stalled_s, TIMEOUT_S, lambda: ended.append(time.monotonic())):
        engine.busy_since = since = time.monotonic()
        while not ended and time.monotonic() < since + 10:  # noqa: ASYNC110 - a thread's matter
            await asyncio.sleep(TIMEOUT_S / 8)

    assert len(ended) == 1
    assert ended[0] - since > TIMEOUT_S / 2


async def test_neither_steps_nor_idleness_are_a_stall(ended: list[float]) -> None:
    engine = Engine()
    with Watchdog(engine.stalled_s, TIMEOUT_S, lambda: ended.append(time.monotonic())):
        await asyncio.sleep(1.5 * TIMEOUT_S)
        for _ in range(12):
            engine.busy_since = time.monotonic()
            await asyncio.sleep(TIMEOUT_S / 8)

    assert ended == []


async def test_an_event_loop_that_hangs_is_noticed_from_outside_of_it(ended: list[float]) -> None:
    with Watchdog(lambda: 0.0, TIMEOUT_S, lambda: ended.append(time.monotonic())):
        await asyncio.sleep(0)
        hangs_until = time.monotonic() + 10
        while not ended and time.monotonic() < hangs_until:
            time.sleep(TIMEOUT_S / 8)  # noqa: ASYNC251 - it hangs
        num_ended = len(ended)

    assert num_ended == 1


async def test_time_that_was_not_lived_through_does_not_count(ended: list[float]) -> None:
    """After a process was suspended, its watchdog sees an engine that seems to hang."""
    said = iter([0.0, 1000.0, 1000.0])
    with Watchdog(lambda: next(said, 0.0), TIMEOUT_S, lambda: ended.append(time.monotonic())):
        await asyncio.sleep(1.5 * TIMEOUT_S)

    assert ended == []


async def test_a_whole_worker_is_watched(
    ended: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()
    # Its engine hangs until the process would have been ended.
    hanging = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: has_ended.wait(60))
    monkeypatch.setattr(echo, "time", hanging)

    def end() -> None:
        ended.append(time.monotonic())
        has_ended.set()

    sampling = SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"stall_timeout_s": TIMEOUT_S, "on_stall": end}
    async with MemoryBus() as bus, echo_worker(bus, **options):
        await ask(bus, new_job("echo", sampling=sampling))

    assert len(ended) == 1
