"""A worker that runs a job beside another worker, because that worker is slow."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shared.errors import InternalError, PublishRefused
from shared.messages import Cancel, Continue, GenerationJob, Hedge, Progress, Replaced, Started
from tests.worker.jobs.test_run import PLANNED, Driver
from worker.jobs.consumer import HeldJob
from worker.jobs.run import Outcome, Refused, Signal, Work

HEDGE = Hedge(number=2, num_tokens=1)
CONTESTED = Continue(
    request_id="r",
    ticket="t",
    attempt=2,
    choices=(Progress(token_ids=(5,)),),
    numerics="cpu",
    replaced=Replaced(worker="worker.a", ticket="a", reason="outrun"),
    is_contested=True,
)
WON = msgspec.structs.replace(CONTESTED, choices=(), is_contested=False)
OUTRUN = Cancel(request_id="r", ticket="t", is_outrun=True)


def hedging(**facts: Any) -> Driver:
    """A run that knows its position, and that another run is the log's writer."""
    driver = Driver(num_returns=1, numerics="cpu", **facts)
    driver.tell(Signal.ADMITTED, PLANNED, Signal.CONFIRMED, CONTESTED)
    return driver


def test_a_hedge_generates_beside_the_run_that_it_hedges() -> None:
    driver = hedging()

    driver.tell(driver.delta())

    assert driver.work[-1] is Work.GENERATE
    assert driver.run.is_contested
    assert driver.run.log.chains[0].token_ids == [5, 7]


@pytest.mark.parametrize("has_written", [False, True])
def test_a_hedge_that_is_outrun_ends_without_a_word_and_without_a_record(
    has_written: bool,
) -> None:
    driver = hedging()
    if has_written:
        driver.tell(driver.delta(), Signal.CONFIRMED)
    num_published = len(driver.published)

    driver.tell(OUTRUN)

    assert driver.outcome is Outcome.SUPERSEDED
    assert (len(driver.published), driver.records) == (num_published, [])


@pytest.mark.parametrize(
    "event", [Signal.DEADLINE, InternalError("broken"), Refused(PublishRefused("too large"))]
)
def test_a_hedge_that_fails_before_it_has_written_leaves_the_request_to_the_other_run(
    event: Any,
) -> None:
    driver = hedging()
    driver.tell(driver.delta())
    num_published = len(driver.published)

    driver.tell(event)

    assert driver.outcome is Outcome.SUPERSEDED
    assert (len(driver.published), driver.records) == (num_published, [])


def test_a_hedge_with_other_numerics_than_the_tokens_gives_up() -> None:
    driver = Driver(num_returns=1, numerics="gpu")

    driver.tell(Signal.ADMITTED, PLANNED, Signal.CONFIRMED, CONTESTED)

    assert driver.outcome is Outcome.SUPERSEDED
    assert [type(event) for event in driver.published] == [Started]


@pytest.mark.parametrize(("has_won", "attempt"), [(False, 0), (True, 2)])
def test_the_failure_of_a_hedge_is_recorded_as_the_requests_only_if_it_is_the_writer(
    has_won: bool, attempt: int
) -> None:
    driver = hedging()
    driver.tell(driver.delta(), Signal.CONFIRMED)
    if has_won:
        driver.tell(WON)

    driver.tell(Signal.DEADLINE)

    assert [record.attempt for record in driver.records] == [attempt]


def job(hedge: Hedge | None) -> GenerationJob:
    return GenerationJob(request_id="r", model="m", prompts=(), hedge=hedge)


@pytest.mark.parametrize(
    ("running", "is_contested", "arriving", "is_beside"),
    [
        (None, False, None, False),
        (None, False, HEDGE, True),
        (HEDGE, True, None, True),
        (HEDGE, False, None, False),
        (HEDGE, False, Hedge(number=4), True),
        (HEDGE, True, HEDGE, False),
    ],
)
def test_the_two_jobs_of_a_race_do_not_run_on_one_worker(
    running: Hedge | None, is_contested: bool, arriving: Hedge | None, is_beside: bool
) -> None:
    runner: Any = SimpleNamespace(is_contested=is_contested)
    held = HeldJob(job(running), runner, cast("Any", SimpleNamespace(num_returns=0)))

    assert held.is_beside(job(arriving)) == is_beside
