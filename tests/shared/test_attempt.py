"""What becomes of a job that crashed so often, in company and alone."""

import pytest

from shared.attempt import Attempt, Verdict
from shared.messages import Continue, Progress


def verdict(num_crashes: int, *, num_returns: int, is_suspect: bool) -> Verdict | None:
    attempt = Attempt("r", 1, ticket="t", num_returns=num_returns, is_suspect=is_suspect)
    return attempt.obey(
        Continue(
            request_id="r",
            ticket="t",
            attempt=num_crashes + 1,
            num_crashes=num_crashes,
            choices=(Progress(),),
        )
    )


@pytest.mark.parametrize(
    ("num_crashes", "expected"),
    [(0, Verdict.GO_ON), (1, Verdict.GO_ON), (2, Verdict.QUARANTINE), (5, Verdict.QUARANTINE)],
)
def test_in_company_two_crashes_are_suspicious(num_crashes: int, expected: Verdict) -> None:
    assert verdict(num_crashes, num_returns=max(1, num_crashes), is_suspect=False) is expected


@pytest.mark.parametrize("num_crashes", [2, 3, 5])
def test_nobody_is_buried_without_having_run_alone(num_crashes: int) -> None:
    assert verdict(num_crashes, num_returns=0, is_suspect=True) is Verdict.GO_ON


def test_a_crash_alone_is_the_last() -> None:
    assert verdict(3, num_returns=1, is_suspect=True) is Verdict.BURY


def test_a_suspect_that_came_back_without_a_crash_goes_on() -> None:
    assert verdict(2, num_returns=1, is_suspect=True) is Verdict.GO_ON
