"""A worker that hangs is ended, and no other."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shared.bus.memory import MemoryBus
from shared.messages import SamplingParams
from tests.support.workers.jobs import ask, new_job
from tests.support.workers.synthetic import echo_worker
from worker.model import echo
from worker.process import watchdog
from worker.process.watchdog import Watchdog

TIMEOUT_S = 0.4
TICK_S = TIMEOUT_S / 8
PATIENCE_S = 240


class Engine:
    """Says that it has been at a step since ``busy_since``."""

    def __init__(self) -> None:
        self.busy_since: float | None = None

    def stalled_s(self) -> float:
        return 0.0 if self.busy_since is None else time.monotonic() - self.busy_since


class Ticks:
    """The clock of a watchdog, and its pauses: time passes in them alone. ``each`` is called in
    each of ``num_ticks`` pauses."""

    def __init__(self, num_ticks: int, each: Callable[["Ticks"], object]) -> None:
        self.now = 0.0
        self._num_left = num_ticks
        self._each = each

    def monotonic(self) -> float:
        return self.now

    def wait(self, pause_s: float) -> bool:
        """As of `threading.Event`."""
        self.now += pause_s
        self._each(self)
        self._num_left -= 1
        return self._num_left < 0

    def is_set(self) -> bool:
        return True


def num_ends(
    monkeypatch: pytest.MonkeyPatch,
    stalled_s: Callable[[Ticks], float],
    num_ticks: int,
    *,
    suspended_s: float = 0.0,
) -> int:
    """How often a process is ended in so many ticks. In the first tick it is suspended."""
    ended: list[float] = []

    def pass_by(ticks: Ticks) -> None:
        dog._mark()
        if ticks.now == TICK_S:
            ticks.now += suspended_s

    ticks = Ticks(num_ticks, pass_by)
    monkeypatch.setattr(watchdog, "time", ticks)
    dog = Watchdog(lambda: stalled_s(ticks), TIMEOUT_S, lambda: ended.append(ticks.now))
    monkeypatch.setattr(dog, "_stopped", ticks)
    dog._watch()
    return len(ended)


@pytest.fixture
def ended() -> list[float]:
    """When the process would have been ended."""
    return []


async def test_an_engine_that_ends_no_step_is_noticed(ended: list[float]) -> None:
    engine = Engine()
    with Watchdog(engine.stalled_s, TIMEOUT_S, lambda: ended.append(time.monotonic())):
        engine.busy_since = since = time.monotonic()
        while not ended and time.monotonic() < since + PATIENCE_S:  # noqa: ASYNC110 (a thread's)
            await asyncio.sleep(TICK_S)

    assert len(ended) == 1


@pytest.mark.parametrize(
    ("stalled_s", "is_ended"),
    [
        (lambda _: 0.0, False),
        (lambda _: TICK_S / 2, False),
        (lambda ticks: round(ticks.now / TICK_S) % 6 * TICK_S, False),
        (lambda ticks: ticks.now, True),
    ],
    ids=["idle", "short steps", "long steps", "no end of a step"],
)
async def test_neither_steps_nor_idleness_are_a_stall(
    stalled_s: Callable[[Ticks], float], is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_ends(monkeypatch, stalled_s, num_ticks=40) == is_ended


async def test_an_event_loop_that_hangs_is_noticed_from_outside_of_it(ended: list[float]) -> None:
    with Watchdog(lambda: 0.0, TIMEOUT_S, lambda: ended.append(time.monotonic())):
        await asyncio.sleep(0)
        hangs_until = time.monotonic() + PATIENCE_S
        while not ended and time.monotonic() < hangs_until:
            time.sleep(TICK_S)  # noqa: ASYNC251 - it hangs
        num_ended = len(ended)

    assert num_ended == 1


@pytest.mark.parametrize(("num_ticks", "is_ended"), [(3, False), (40, True)])
async def test_time_that_was_not_lived_through_does_not_count(
    num_ticks: int, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a process was suspended, its watchdog sees an engine that seems to hang."""
    found = num_ends(monkeypatch, lambda ticks: ticks.now, num_ticks, suspended_s=1000)

    assert found == is_ended


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
