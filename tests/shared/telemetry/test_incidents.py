import asyncio
import logging
from functools import partial

import aiormq
import pytest

from gateway.metrics import Metrics
from shared.telemetry import incidents


def test_an_incident_leaves_a_line_with_its_traceback_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_before = incidents.num_reported("job")

    with caplog.at_level(logging.ERROR):
        incidents.report("job", "job failed", ValueError("broken"), request_id="r1")

    (record,) = caplog.records
    assert record.message == "job failed"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    assert vars(record)["request_id"] == "r1"
    assert incidents.num_reported("job") == num_before + 1


def test_the_gateway_exposes_the_incidents_of_its_process() -> None:
    incidents.report("request", "request failed", None)

    assert b'warren_incidents_total{kind="request"}' in Metrics().render()


def test_what_is_survived_is_reported() -> None:
    num_before = incidents.num_reported("task")

    with incidents.survived("task", "task failed"):
        int("broken")

    assert incidents.num_reported("task") == num_before + 1


def test_a_cancellation_is_not_survived() -> None:
    num_before = incidents.num_reported("task")

    with pytest.raises(asyncio.CancelledError), incidents.survived("task", "task failed"):
        raise asyncio.CancelledError

    assert incidents.num_reported("task") == num_before


async def test_work_that_fails_is_started_again_until_it_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "_MIN_RESTART_PAUSE_S", 0.001)
    failures = [ValueError("first"), ValueError("second")]

    async def work() -> None:
        if failures:
            raise failures.pop(0)

    await incidents.keep_running(work)

    assert not failures
    assert [record.message for record in caplog.records] == ["background task restarted"] * 2


async def test_work_that_is_kept_running_can_be_cancelled() -> None:
    task = asyncio.create_task(incidents.keep_running(partial(asyncio.sleep, 5)))
    await asyncio.sleep(0)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("kind", "error", "is_short"),
    [
        ("connection", ConnectionResetError("gone"), True),
        ("channel", aiormq.exceptions.ChannelClosed("gone"), True),
        ("channel", ValueError("a bug"), False),
        ("request", ConnectionResetError("gone"), False),
    ],
)
def test_a_lost_connection_has_a_reason_instead_of_a_traceback(
    caplog: pytest.LogCaptureFixture,
    kind: incidents.IncidentKind,
    error: Exception,
    *,
    is_short: bool,
) -> None:
    incidents.report(kind, "lost", error)
    [record] = caplog.records

    assert incidents.shorten_loss(record)
    assert (record.exc_info is None) == is_short
    assert hasattr(record, "reason") == is_short
