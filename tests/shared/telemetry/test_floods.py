"""Floods of log lines that strangers cause."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shared.telemetry import floods, incidents, requests
from shared.telemetry.floods import MAX_LINES, WINDOW_S
from shared.telemetry.metrics import PROCESS


class Timers:
    """A clock that tests move, and the calls that wait for it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._due.append((self.now + delay_s, call))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due, self._due = self._due, [one for one in self._due if one[0] > self.now]
        for at, call in due:
            if at <= self.now:
                call()


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def limiter(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> floods.Limiter:
    own = floods.Limiter(floods.write_summary, clock=lambda: timers.now, later=timers.later)
    monkeypatch.setattr(floods, "LINES", own)
    return own


def num_allowed(limiter: floods.Limiter, number: int, party: str = "") -> int:
    return sum(limiter.allows("request refused", party) for _ in range(number))


def num_counted() -> float:
    labels = {"event": "request refused"}
    return PROCESS.registry.get_sample_value("warren_log_lines_left_out_total", labels) or 0.0


def summaries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [vars(one) for one in caplog.records if one.message == "log lines left out"]
    return [{name: line[name] for name in ("about", "num_left_out", "of")} for line in lines]


def test_a_flood_is_limited_and_summarised_once_in_a_window(
    limiter: floods.Limiter, timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    counted_before = num_counted()

    assert num_allowed(limiter, 1000) == MAX_LINES
    assert summaries(caplog) == []
    timers.advance(WINDOW_S)

    num_left_out = 1000 - MAX_LINES
    assert summaries(caplog) == [
        {
            "about": "request refused",
            "num_left_out": num_left_out,
            "of": {"anonymous": num_left_out},
        }
    ]
    assert num_counted() - counted_before == num_left_out
    assert num_allowed(limiter, 1) == 1


def test_a_timer_that_is_early_begins_a_new_window(
    limiter: floods.Limiter, timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    num_allowed(limiter, MAX_LINES + 1)
    timers.now -= 0.001

    timers.advance(WINDOW_S)
    timers.now += 0.001
    timers.advance(0)
    num_allowed(limiter, MAX_LINES + 2)
    timers.advance(WINDOW_S)

    assert [one["num_left_out"] for one in summaries(caplog)] == [1, 2]


def test_one_partys_flood_leaves_the_lines_of_others(limiter: floods.Limiter) -> None:
    num_allowed(limiter, 1000)

    assert num_allowed(limiter, 1000, "alice") == MAX_LINES
    assert num_allowed(limiter, 5, "bob") == 5


def test_names_without_end_share_a_budget(limiter: floods.Limiter) -> None:
    num_written = sum(num_allowed(limiter, 1, f"tenant {number}") for number in range(5000))

    assert num_written == 1000 + MAX_LINES


def test_lines_about_refused_requests_are_limited(
    limiter: floods.Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(1000):
        requests.write_line("request refused", None, {"path": "/"})
    for _ in range(5):
        requests.write_line("request refused", None, {"path": "/", "tenant": "alice"})

    tenants = [getattr(one, "tenant", "") for one in caplog.records]
    assert tenants == [""] * MAX_LINES + ["alice"] * 5


def test_lines_about_accepted_requests_are_not_limited(
    limiter: floods.Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(MAX_LINES + 1):
        requests.write_line("request accepted", None, {"tenant": "alice"})

    assert len(caplog.records) == MAX_LINES + 1


def test_tracebacks_of_one_event_are_limited_and_each_is_counted(
    limiter: floods.Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    before = incidents.num_reported("request")
    for _ in range(1000):
        incidents.report("request", "request failed", ValueError("odd"))
    incidents.report("request", "stream failed", ValueError("odd"))

    assert len(caplog.records) == MAX_LINES + 1
    assert incidents.num_reported("request") - before == 1001


def test_a_librarys_lines_are_limited_by_message(
    limiter: floods.Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("a library")
    library.addFilter(floods.LibraryFilter())
    for number in range(1000):
        library.warning("connection %d reset", number)
    library.warning("no more files")

    assert len(caplog.records) == MAX_LINES + 1


def test_a_summary_needs_no_event_loop() -> None:
    is_written = threading.Event()

    floods._in_thread(0.0, is_written.set)

    assert is_written.wait(60)
