"""What is said of a store that fails, and when it counts as working again."""

import logging
from typing import Any

import pytest

from shared.telemetry.store_outage import StoreOutage


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def field(record: logging.LogRecord, name: str) -> Any:
    return record.__dict__[name]


def test_an_outage_is_one_line_with_its_reason_and_a_reminder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = StoreOutage("database", clock=clock)

    for _ in range(61):
        outage.failed("refused")
        clock.now_s += 1
    outage.worked()
    outage.worked()

    assert lines(caplog) == [
        "database unavailable",
        "database still unavailable",
        "database available again",
    ]
    assert field(caplog.records[0], "reason") == "refused"
    assert field(caplog.records[1], "lost_s") == 60.0


def test_reading_does_not_end_an_outage_of_writing() -> None:
    outage = StoreOutage("file storage")
    outage.failed("No space left on device")
    outage.failed("Input/output error", is_writing=False)

    outage.worked(is_writing=False)
    assert not outage.is_up()

    outage.worked()
    assert outage.is_up()


def test_reading_ends_an_outage_of_reading() -> None:
    outage = StoreOutage("file storage")
    outage.failed("No space left on device")
    outage.worked()
    outage.failed("Input/output error", is_writing=False)

    outage.worked(is_writing=False)

    assert outage.is_up()


def test_nothing_ends_an_outage_right_after_a_failure() -> None:
    clock = Clock()
    outage = StoreOutage("database", 15.0, clock)
    outage.failed("No space left on device")

    clock.now_s += 14
    outage.worked()
    assert not outage.is_up()

    clock.now_s += 1
    outage.worked()
    assert outage.is_up()
