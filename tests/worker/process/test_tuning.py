"""How long a worker waits for readers follows from how long gateways wait for clients."""

import pytest

from worker.process.tuning import WORKER_TUNING, WorkerTuning


@pytest.mark.parametrize(("disconnect_grace_s", "expected_s"), [(0, 10), (5, 10), (60, 65)])
def test_a_worker_outwaits_the_gateways(disconnect_grace_s: float, expected_s: float) -> None:
    assert WORKER_TUNING.wait_for_reader_s(disconnect_grace_s) == expected_s


def test_a_chosen_time_takes_precedence() -> None:
    assert WorkerTuning(reader_grace_s=0.1).wait_for_reader_s(60) == 0.1
