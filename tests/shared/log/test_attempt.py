"""What happens to a job after crashes, in and outside quarantine, and with a broken log."""

import msgspec
import pytest

from shared.log import LogWriter
from shared.log.writer import NUM_INQUIRIES, Attempt, Verdict
from shared.messages import Accepted, Continue, Progress, ReplyEvent, Started


def told(num_crashes: int, num_crashes_alone: int = 0) -> Continue:
    return Continue(
        request_id="r",
        ticket="t",
        attempt=num_crashes + 1,
        num_crashes=num_crashes,
        num_crashes_alone=num_crashes_alone,
        choices=(Progress(),),
    )


def verdict(
    num_crashes: int, num_crashes_alone: int = 0, *, num_returns: int, is_suspect: bool
) -> Verdict | None:
    """The attempt's decision, which must not depend on how often it is asked."""
    attempt = Attempt("r", 1, ticket="t", num_returns=num_returns, is_suspect=is_suspect)
    answers = [attempt.obey(told(num_crashes, num_crashes_alone)) for _ in range(NUM_INQUIRIES)]
    return next((answer for answer in answers if answer is not None), None)


def started(ticket: str, num_returns: int) -> Started:
    return Started(
        worker="w",
        ticket=ticket,
        num_prompt_tokens=(1,),
        is_waiting=num_returns > 0,
        num_returns=num_returns,
    )


@pytest.mark.parametrize(
    ("num_crashes", "expected"),
    [
        (0, Verdict.CONTINUE),
        (1, Verdict.CONTINUE),
        (2, Verdict.QUARANTINE),
        (5, Verdict.QUARANTINE),
    ],
)
def test_in_company_two_crashes_are_suspicious(num_crashes: int, expected: Verdict) -> None:
    assert verdict(num_crashes, num_returns=max(1, num_crashes), is_suspect=False) is expected


@pytest.mark.parametrize("num_crashes", [2, 3, 5])
@pytest.mark.parametrize("num_returns", [0, 1, 3])
def test_nobody_is_dead_lettered_without_having_run_alone(
    num_crashes: int, num_returns: int
) -> None:
    assert verdict(num_crashes, num_returns=num_returns, is_suspect=True) is Verdict.CONTINUE


def test_a_crash_alone_is_the_last() -> None:
    assert verdict(3, 1, num_returns=1, is_suspect=True) is Verdict.DEAD_LETTER


def test_a_run_that_says_late_that_it_lives_has_not_crashed() -> None:
    suspect = Attempt("r", 1, ticket="t", num_returns=1, is_suspect=True)

    answers = [suspect.obey(told(3, 1)) for _ in range(NUM_INQUIRIES - 1)]

    assert answers == [None] * (NUM_INQUIRIES - 1)
    assert suspect.obey(told(2)) is Verdict.CONTINUE


def test_no_crash_is_believed_in_while_the_brokers_clients_come_back() -> None:
    suspect = Attempt("r", 1, ticket="t", num_returns=1, is_suspect=True)

    assert suspect.obey(told(3, 1)) is None
    assert suspect.obey(told(3, 1), is_settled=False) is Verdict.CONTINUE


def test_a_job_that_was_left_by_an_earlier_execution_is_dropped() -> None:
    attempt = Attempt("r", 1, ticket="t", num_returns=1, execution=1)
    start = msgspec.structs.replace(started("t", 1), execution=1)

    verdict = attempt.read([Accepted(body_hash="h", execution=2), start])

    assert verdict is Verdict.FOREIGN


BROKEN: list[ReplyEvent | None] = [started("a", 0), None, LogWriter(1, 1).delta(0, [1], "a")]


def test_a_log_that_cannot_be_decoded_fails_behind_what_can() -> None:
    attempt = Attempt("r", 1, ticket="b", num_returns=1)

    assert attempt.read([*BROKEN, started("b", 1)]) is Verdict.FAIL
    assert attempt.log is not None
    assert (attempt.log.attempt, attempt.log.chains[0].token_ids) == (2, [1])


def test_an_attempt_waits_until_its_own_start_is_in_the_broken_log() -> None:
    assert Attempt("r", 1, ticket="b", num_returns=1).read(BROKEN) is None


def test_what_cannot_be_decoded_harms_no_log_that_has_ended() -> None:
    end = LogWriter(1, 1).finish(0, [1], "a", "stop")
    log: list[ReplyEvent | None] = [started("a", 0), end, None, started("b", 1)]

    assert Attempt("r", 1, ticket="b", num_returns=1).read(log) is Verdict.ENDED


def test_an_answer_from_before_the_move_to_another_log_has_no_effect() -> None:
    attempt = Attempt("r", 1, ticket="t")
    attempt.forget_place()

    earlier = attempt.obey(told(0))
    answer = attempt.obey(msgspec.structs.replace(told(0), num_moves=1))

    assert (earlier, answer) == (None, Verdict.CONTINUE)
