"""What operators read of a broker that is away."""

import logging
from dataclasses import dataclass

import pytest

from shared.bus.outage import Outage
from shared.telemetry import metrics


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def num_reconnects() -> float:
    value = metrics.PROCESS.registry.get_sample_value("warren_broker_reconnects_total")
    assert value is not None
    return value


def test_an_outage_is_logged_at_its_start_every_ten_seconds_and_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = Outage({"broker": "b:5672"}, clock)
    num_before = num_reconnects()

    outage.lost(ConnectionError("gone"))
    for _ in range(25):
        clock.now += 1
        outage.failed("broker unreachable", ConnectionError("refused"))
    outage.ended()

    lines = [(record.message, vars(record).get("lost_s")) for record in caplog.records]
    assert lines == [
        ("broker connection lost", None),
        ("broker unreachable", None),
        ("broker still unreachable", 11.0),
        ("broker still unreachable", 21.0),
        ("broker connected again", 25.0),
    ]
    assert num_reconnects() == num_before + 1


def test_the_first_connection_is_no_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    num_before = num_reconnects()

    Outage({}).ended()

    assert (caplog.records, num_reconnects()) == ([], num_before)
