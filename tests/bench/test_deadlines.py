import pytest

from bench import deadlines
from bench.deadlines import measure


def test_more_jobs_end_in_time_by_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LOADS", (1.2,))

    of_arrival, by_deadline = measure(num_jobs=200)

    assert by_deadline.in_time > of_arrival.in_time + 0.05
    assert by_deadline.wasted < of_arrival.wasted
