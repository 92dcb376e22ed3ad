"""The order in which the waiting jobs of a tenant begin."""

import random

import pytest

from worker.jobs.line import WaitingLine

NOW = 100.0


def line_of(*jobs: tuple[str, float | None]) -> WaitingLine[str]:
    line: WaitingLine[str] = WaitingLine()
    for job, begin_by in jobs:
        line.add(job, begin_by)
    return line


def begun(line: WaitingLine[str], now: float = NOW) -> str:
    """All jobs, in the order in which they begin."""
    order = ""
    while line:
        first = line.first(now)
        line.remove(first)
        order += first
    return order


def test_the_job_with_the_least_slack_begins_first() -> None:
    assert begun(line_of(("a", 130), ("b", 110), ("c", 120))) == "bca"


def test_jobs_with_equal_slack_begin_in_the_order_of_their_arrival() -> None:
    assert begun(line_of(("a", 110), ("b", 110), ("c", 110))) == "abc"


def test_a_job_that_is_late_makes_no_other_late() -> None:
    assert begun(line_of(("a", 90), ("b", 110), ("c", None), ("d", 80))) == "bcda"


def test_jobs_without_deadlines_begin_in_the_order_of_their_arrival() -> None:
    assert begun(line_of(("a", None), ("b", None), ("c", None))) == "abc"


def test_a_job_without_a_deadline_keeps_its_place() -> None:
    assert begun(line_of(("a", 140), ("b", None), ("c", 110), ("d", None), ("e", 120))) == "cbeda"


def test_urgent_jobs_that_keep_coming_do_not_starve_one_without_a_deadline() -> None:
    line = line_of(*((f"{k}", NOW + k) for k in range(5)), ("x", None))
    for k in range(5):
        line.remove(first := line.first(NOW))
        assert first != "x"
        line.add(f"later {k}", NOW)

    assert line.first(NOW) == "x"


def test_a_job_that_left_is_removed_again_without_effect() -> None:
    line = line_of(("a", None), ("b", 110))
    line.remove("a")
    line.remove("a")

    assert (list(line), len(line)) == (["b"], 1)


@pytest.mark.parametrize("seed", range(20))
def test_jobs_without_deadlines_begin_no_later_than_in_the_order_of_arrival(seed: int) -> None:
    draw = random.Random(seed)
    line: WaitingLine[int] = WaitingLine()
    before: dict[int, int] = {}
    for number in range(200):
        is_patient = draw.random() < 0.3
        if is_patient:
            before[number] = len(line)
        line.add(number, None if is_patient else NOW + draw.uniform(-5, 50))
        while line and draw.random() < 0.5:
            line.remove(first := line.first(NOW))
            assert before.pop(first, 0) >= 0
            before = {job: num - 1 for job, num in before.items()}
            assert all(num >= 0 for num in before.values())
