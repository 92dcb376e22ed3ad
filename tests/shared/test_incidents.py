import logging

import pytest

from gateway.metrics import Metrics
from shared import incidents


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

    assert b'warren:incidents_total{kind="request"}' in Metrics().render()
