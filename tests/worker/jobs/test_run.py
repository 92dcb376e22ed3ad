"""A job's run, event by event: what it publishes, and how its job is settled."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PublishRefused,
    QueueDown,
    Unroutable,
    WarrenError,
)
from shared.log import LogReader
from shared.log.writer import NUM_INQUIRIES
from shared.messages import (
    Cancel,
    Completed,
    Continue,
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    Progress,
    ReplyEvent,
    Started,
    TokenDelta,
    TokenPrompt,
)
from worker.jobs.run import (
    MAX_RETURNS,
    Action,
    Decoded,
    Event,
    JobRun,
    LogRead,
    Outcome,
    Planned,
    Publish,
    Record,
    Refused,
    Settle,
    Signal,
    Work,
)

CONTINUE = Continue(request_id="r", ticket="t", attempt=2, choices=(Progress(token_ids=(5,)),))
PLANNED = Planned((1,), is_fresh=True)


class Driver:
    """A run, what it has asked to publish, and the rest of its actions."""

    def __init__(self, mode: str = "stream", **facts: Any) -> None:
        job = GenerationJob(
            request_id="r",
            model="m",
            prompts=(TokenPrompt(token_ids=(1,)),),
            mode="final" if mode == "final" else "stream",
        )
        self.run = JobRun(job, worker="w", ticket="t", **facts)
        self.published: list[ReplyEvent] = []
        self.work: list[Work] = []
        self.records: list[Record] = []
        self.outcome: Outcome | None = None

    def tell(self, *events: Event, is_settled: bool = True) -> None:
        for event in events:
            for action in self.run.on(event, is_settled=is_settled):
                self._note(action)

    def _note(self, action: Action) -> None:
        assert self.outcome is None, "an action after the settlement"
        match action:
            case Publish():
                self.published.append(action.event)
            case Record():
                self.records.append(action)
            case Settle():
                self.outcome = action.outcome
            case _:
                self.work.append(action)

    def delta(self) -> Decoded:
        return Decoded([self.run.log.delta(0, [7], "a")])

    def finish(self) -> Decoded:
        return Decoded([self.run.log.finish(0, [8], "b", "stop")])

    @property
    def kinds(self) -> list[type[ReplyEvent]]:
        return [type(event) for event in self.published]

    @property
    def failure(self) -> Failed:
        assert isinstance(self.published[-1], Failed)
        return self.published[-1]


def planned(mode: str = "stream", **facts: Any) -> Driver:
    driver = Driver(mode, **facts)
    driver.tell(Signal.ADMITTED, PLANNED)
    return driver


def generating() -> Driver:
    """A stream whose `Started` is confirmed."""
    driver = planned()
    driver.tell(Signal.CONFIRMED)
    return driver


def waiting(**facts: Any) -> Driver:
    """A run of a job that came back, which reads the log."""
    driver = planned(num_returns=1, **facts)
    driver.tell(Signal.CONFIRMED)
    return driver


def accepted(events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
    """What a reader passes on of a log."""
    reader = LogReader("r", 1)
    return [action.event for e in events for action in reader.read(e) if hasattr(action, "event")]


def test_an_undisturbed_stream_is_answered_when_its_end_is_confirmed() -> None:
    driver = generating()

    driver.tell(driver.delta(), Signal.CONFIRMED)
    driver.tell(driver.finish())
    is_open = driver.outcome is None
    driver.tell(Signal.CONFIRMED)

    assert driver.kinds == [Started, TokenDelta, Finished]
    assert (is_open, driver.outcome) == (True, Outcome.ANSWERED)


def test_the_engine_of_a_fresh_job_does_not_wait_for_the_broker() -> None:
    driver = planned()

    assert driver.work == [Work.PLAN, Work.GENERATE]
    assert driver.kinds == [Started]


def test_a_job_that_waited_is_confirmed_before_any_work_is_done() -> None:
    driver = Driver()

    driver.tell(Signal.ADMITTED, Planned((1,), is_fresh=False))
    before = list(driver.work)
    driver.tell(Signal.CONFIRMED)

    assert (before, driver.work) == ([Work.PLAN], [Work.PLAN, Work.GENERATE])


def test_events_are_published_one_at_a_time() -> None:
    driver = planned()

    driver.tell(driver.delta(), driver.delta())
    before = driver.kinds
    driver.tell(Signal.CONFIRMED, Signal.CONFIRMED)

    assert (before, driver.kinds) == ([Started], [Started, TokenDelta, TokenDelta])


@pytest.mark.parametrize(
    ("signal", "end", "outcome"),
    [
        (Signal.DEADLINE, Failed, Outcome.ANSWERED),
        (Cancel(request_id="r"), Failed, Outcome.ANSWERED),
        (Signal.HAND_OVER, HandedOver, Outcome.HANDED_OVER),
        (Cancel(request_id="r", ticket="t", is_replaced=True), HandedOver, Outcome.REQUEUED),
    ],
)
def test_an_interruption_stops_the_work_at_once_and_ends_the_log_behind_what_is_published(
    signal: Event, end: type[ReplyEvent], outcome: Outcome
) -> None:
    driver = generating()

    driver.tell(driver.delta(), signal)
    work, kinds = driver.work[-1], driver.kinds
    driver.tell(Signal.CONFIRMED, Signal.CONFIRMED)

    assert (work, kinds) == (Work.NONE, [Started, TokenDelta])
    assert driver.kinds == [Started, TokenDelta, end]
    assert driver.outcome is outcome
    assert end is HandedOver or accepted(driver.published) == driver.published


@pytest.mark.parametrize("late", [Signal.DEADLINE, Signal.HAND_OVER, Cancel(request_id="r")])
@pytest.mark.parametrize("mode", ["stream", "final"])
def test_what_comes_after_the_last_event_changes_nothing(mode: str, late: Event) -> None:
    driver = planned(mode)
    driver.tell(*[Signal.CONFIRMED] * (mode == "stream"), driver.finish())

    driver.tell(late, Signal.CONFIRMED, late)

    assert driver.kinds[-1] is (Completed if mode == "final" else Finished)
    assert driver.outcome is Outcome.ANSWERED


def test_a_final_job_is_answered_with_one_message() -> None:
    driver = planned("final")

    driver.tell(driver.delta())
    driver.tell(driver.finish(), Signal.CONFIRMED)

    (completed,) = driver.published
    assert isinstance(completed, Completed)
    assert (completed.choices[0].text, completed.choices[0].token_ids) == ("ab", (7, 8))


def test_handing_over_says_nothing_to_who_waits_for_one_message() -> None:
    driver = planned("final")

    driver.tell(Signal.HAND_OVER)

    assert (driver.published, driver.outcome) == ([], Outcome.HANDED_OVER)


@pytest.mark.parametrize("mode", ["stream", "final"])
def test_the_last_event_is_published_again_and_never_replaced(mode: str) -> None:
    driver = planned(mode)
    if mode == "stream":
        driver.tell(Signal.CONFIRMED)
    driver.tell(InvalidRequest("it broke"))
    failed = driver.failure

    driver.tell(Signal.UNCONFIRMED)
    is_open = driver.outcome is None
    driver.tell(Signal.CONFIRMED)

    assert driver.published[-2:] == [failed, failed]
    assert (is_open, driver.outcome) == (True, Outcome.ANSWERED)


def test_an_event_that_cannot_be_confirmed_twice_leaves_the_outcome_unknown() -> None:
    driver = generating()

    driver.tell(driver.delta(), Signal.UNCONFIRMED, Signal.UNCONFIRMED)

    assert driver.outcome is Outcome.UNKNOWN


def test_an_unknown_fate_does_not_end_a_stream() -> None:
    driver = generating()

    for _ in range(2):
        driver.tell(driver.delta(), Signal.UNCONFIRMED, Signal.CONFIRMED)

    assert (driver.outcome, len(accepted(driver.published))) == (None, 3)


@pytest.mark.parametrize("mode", ["stream", "final"])
def test_a_job_that_nobody_reads_is_dropped(mode: str) -> None:
    driver = planned(mode)
    if mode == "final":
        driver.tell(driver.finish())

    driver.tell(Refused(Unroutable("gone")))

    assert (driver.work[-1], driver.outcome) == (Work.NONE, Outcome.UNREAD)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InternalError("broken"), Outcome.REPUBLISHED),
        (DeadlineExceeded("late"), Outcome.UNREAD),
        (Cancelled("unread"), Outcome.UNREAD),
    ],
)
def test_a_failure_waits_for_the_node_of_its_log_if_anyone_may_need_it(
    error: WarrenError, outcome: Outcome
) -> None:
    driver = generating()
    driver.tell(error)

    driver.tell(Refused(QueueDown("down")))

    assert driver.outcome is outcome


def test_a_job_that_crashes_workers_is_dead_lettered_although_its_log_is_down() -> None:
    driver = planned("final", num_returns=4, is_suspect=True)

    driver.tell(Refused(QueueDown("down")))

    assert driver.outcome is not Outcome.REPUBLISHED


def test_a_refused_answer_is_replaced_by_an_error_and_a_refused_error_by_nothing() -> None:
    driver = planned("final")
    driver.tell(driver.finish())

    driver.tell(Refused(PublishRefused("full")))
    code = driver.failure.code
    driver.tell(Refused(PublishRefused("full")))

    assert (code, driver.outcome) == (PublishRefused.code, Outcome.DEAD_LETTERED)


def test_a_refused_start_leaves_the_failure_without_a_position() -> None:
    driver = planned()

    driver.tell(Refused(PublishRefused("full")))

    assert (driver.failure.attempt, accepted([driver.failure])) == (0, [driver.failure])


@pytest.mark.parametrize("is_last", [False, True])
def test_readers_accept_the_failure_that_follows_a_refused_event(is_last: bool) -> None:
    driver = generating()

    driver.tell(driver.finish() if is_last else driver.delta())
    refused = driver.published.pop()
    driver.tell(Refused(PublishRefused("full")))
    failed = driver.failure
    driver.tell(Signal.CONFIRMED)

    assert refused not in accepted(driver.published)
    assert accepted(driver.published)[-1] == failed
    assert (failed.code, driver.outcome) == (PublishRefused.code, Outcome.ANSWERED)


@pytest.mark.parametrize("error", [InvalidRequest("too long"), Signal.DEADLINE])
def test_a_first_run_that_fails_before_it_starts_says_that_alone(error: Event) -> None:
    driver = Driver()

    driver.tell(Signal.ADMITTED, error, Signal.CONFIRMED)

    assert (driver.kinds, driver.failure.attempt) == ([Failed], 0)
    assert driver.outcome is Outcome.ANSWERED


def test_a_returned_job_goes_on_where_its_reader_says() -> None:
    driver = waiting()
    before = list(driver.work)

    driver.tell(CONTINUE)
    driver.tell(driver.finish())

    assert (before, driver.work[2]) == ([Work.PLAN, Work.READ_LOG], Work.GENERATE)
    assert isinstance(driver.published[-1], Finished)
    assert (driver.published[-1].attempt, driver.published[-1].index) == (2, 1)


def test_a_run_without_an_answer_asks_again() -> None:
    driver = waiting()

    driver.tell(Signal.UNANSWERED, Signal.CONFIRMED)

    assert driver.published[0] == driver.published[1]
    assert driver.work[-2:] == [Work.READ_LOG, Work.READ_LOG]


def test_a_returned_job_whose_prompt_is_refused_fails_behind_what_readers_have() -> None:
    driver = Driver(num_returns=1)

    driver.tell(Signal.ADMITTED, InvalidRequest("too long"), Signal.CONFIRMED, CONTINUE)

    assert driver.kinds == [Started, Failed]
    assert (driver.failure.code, driver.failure.index) == ("invalid_request", 1)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_returned_job_whose_deadline_passes_fails_with_its_ticket(is_started: bool) -> None:
    driver = waiting() if is_started else Driver(num_returns=1)

    driver.tell(Signal.DEADLINE, Signal.CONFIRMED, Signal.CONFIRMED)

    assert driver.kinds == [Started, Failed]
    assert (driver.failure.ticket, driver.outcome) == ("t", Outcome.ANSWERED)


def test_a_log_that_has_ended_needs_nothing_more() -> None:
    driver, other = waiting(), generating()
    other.tell(other.finish(), Signal.CONFIRMED)

    driver.tell(LogRead([*other.published, *driver.published]))

    assert (driver.kinds, driver.outcome) == ([Started], Outcome.ANSWERED)


def test_a_superseded_run_says_nothing_more() -> None:
    driver = generating()

    driver.tell(driver.delta(), Signal.SUPERSEDED, Signal.CONFIRMED)

    assert (driver.kinds, driver.outcome) == ([Started, TokenDelta], Outcome.SUPERSEDED)


def test_a_log_that_a_newer_run_owns_needs_nothing_more() -> None:
    driver = waiting()
    newer = Started(worker="v", ticket="u", num_prompt_tokens=(1,), is_waiting=True, publication=1)

    driver.tell(LogRead([newer, *driver.published]))

    assert (driver.kinds, driver.outcome) == ([Started], Outcome.SUPERSEDED)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(Signal.CONFIRMED, Outcome.SUPERSEDED), (Refused(Unroutable("gone")), Outcome.UNREAD)],
    ids=["the log goes on", "the log is deleted"],
)
def test_a_run_that_is_stopped_before_it_has_a_position_ends_nothing_but_a_log_that_is_gone(
    answer: Event, outcome: Outcome
) -> None:
    driver = waiting()

    driver.tell(Cancel(request_id="r", ticket="t"), answer)

    assert (driver.kinds, driver.outcome) == ([Started, Failed], outcome)
    assert [record.attempt for record in driver.records] == [0]


@pytest.mark.parametrize(
    ("is_suspect", "crashes", "end", "outcome"),
    [
        (False, {"num_crashes": 2}, HandedOver, Outcome.QUARANTINED),
        (True, {"num_crashes": 3, "num_crashes_alone": 1}, Failed, Outcome.DEAD_LETTERED),
    ],
)
def test_a_job_whose_workers_crashed_is_quarantined_and_then_dead_lettered(
    is_suspect: bool, crashes: dict[str, Any], end: type[ReplyEvent], outcome: Outcome
) -> None:
    driver = waiting(is_suspect=is_suspect)
    command = Continue(request_id="r", ticket="t", attempt=2, choices=(Progress(),), **crashes)

    driver.tell(*[command] * NUM_INQUIRIES, Signal.CONFIRMED)

    assert (driver.kinds, driver.outcome) == ([Started, end], outcome)


def foreign(**facts: Any) -> Driver:
    """A run that is to continue tokens of other numerics."""
    driver = waiting(numerics="mine", **facts)
    driver.tell(msgspec.structs.replace(CONTINUE, numerics="other"))
    return driver


@pytest.mark.parametrize(
    ("answer", "outcome", "work"),
    [
        (Signal.PEERS_FOUND, Outcome.MOVED, Work.NONE),
        (Signal.NO_PEERS, None, Work.GENERATE),
    ],
)
def test_tokens_of_other_numerics_are_left_to_peers_that_have_them(
    answer: Signal, outcome: Outcome | None, work: Work
) -> None:
    driver = foreign()

    driver.tell(answer)
    driver.tell(*[Signal.CONFIRMED] * (len(driver.published) - 1))

    assert driver.work[-2 if outcome is None else -3] is Work.FIND_PEERS
    assert (driver.outcome, driver.work[-1], driver.run.numerics) == (outcome, work, "other")


def test_a_worker_that_requires_equal_numerics_asks_for_no_peers() -> None:
    driver = foreign(requires_same_numerics=True)

    driver.tell(Signal.CONFIRMED)

    assert Work.FIND_PEERS not in driver.work
    assert (driver.kinds, driver.outcome) == ([Started, HandedOver], Outcome.MOVED)


@pytest.mark.parametrize("numerics", ["", "mine"])
def test_tokens_of_equal_or_unknown_numerics_are_continued(numerics: str) -> None:
    driver = waiting(numerics="mine", requires_same_numerics=True)

    driver.tell(msgspec.structs.replace(CONTINUE, numerics=numerics))

    assert driver.work[-1] is Work.GENERATE


@pytest.mark.parametrize("is_required", [False, True])
def test_a_job_in_quarantine_is_not_moved_to_where_others_run(is_required: bool) -> None:
    driver = foreign(is_suspect=True, requires_same_numerics=is_required)

    driver.tell(Signal.CONFIRMED)

    assert driver.outcome is (Outcome.DEAD_LETTERED if is_required else None)
    assert (Work.GENERATE in driver.work) != is_required


@pytest.mark.parametrize(
    ("mode", "num_returns", "is_suspect", "is_settled", "outcome"),
    [
        ("stream", MAX_RETURNS, False, True, Outcome.QUARANTINED),
        ("stream", MAX_RETURNS, False, False, Outcome.REPUBLISHED),
        ("final", 2, False, True, Outcome.QUARANTINED),
        ("final", 3, True, True, None),
        ("final", 4, True, False, Outcome.REPUBLISHED),
        ("final", 4, True, True, Outcome.DEAD_LETTERED),
    ],
)
def test_a_job_that_was_returned_too_often_is_not_run(
    mode: str, num_returns: int, is_suspect: bool, is_settled: bool, outcome: Outcome | None
) -> None:
    driver = Driver(mode, num_returns=num_returns, is_suspect=is_suspect)

    driver.tell(Signal.ADMITTED, is_settled=is_settled)
    driver.tell(*[Signal.CONFIRMED] * len(driver.published))

    assert driver.outcome is outcome
    assert (Work.PLAN in driver.work) == (outcome is None)


@pytest.mark.parametrize("mode", ["stream", "final"])
def test_what_a_request_has_used_is_recorded_before_its_end_is_published(mode: str) -> None:
    driver = planned(mode)
    driver.tell(Signal.CONFIRMED, driver.delta(), Signal.CONFIRMED)

    actions = driver.run.on(driver.finish())

    record, publish = [action for action in actions if isinstance(action, Record | Publish)]
    assert isinstance(publish, Publish)
    assert record == Record(
        outcome="completed",
        attempt=1,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=2,
        num_takeovers=0,
    )


def test_the_tokens_of_earlier_runs_are_recorded_too() -> None:
    driver = waiting()
    driver.tell(CONTINUE)

    driver.tell(driver.finish())

    assert [(r.attempt, r.num_takeovers, r.num_output_tokens) for r in driver.records] == [
        (2, 1, 2)
    ]


def test_a_job_that_waited_in_vain_for_its_worker_was_not_taken_over() -> None:
    driver = planned(num_returns=1)
    driver.tell(Signal.CONFIRMED)
    driver.tell(Continue(request_id="r", ticket="t", attempt=2, choices=(Progress(),)))

    driver.tell(driver.finish())

    assert [(r.attempt, r.num_takeovers) for r in driver.records] == [(2, 0)]


def test_a_failure_is_recorded_with_its_code() -> None:
    driver = generating()

    driver.tell(driver.delta(), Signal.CONFIRMED, Signal.DEADLINE)

    assert [(r.outcome, r.num_output_tokens) for r in driver.records] == [("deadline_exceeded", 1)]


@pytest.mark.parametrize("mode", ["stream", "final"])
def test_a_request_that_goes_on_elsewhere_is_not_recorded(mode: str) -> None:
    driver = planned(mode)

    driver.tell(Signal.CONFIRMED, Signal.HAND_OVER, Signal.CONFIRMED)

    assert (driver.outcome, driver.records) == (Outcome.HANDED_OVER, [])


def test_a_request_that_nobody_reads_is_recorded_behind_all_other_records() -> None:
    driver = generating()

    driver.tell(driver.delta(), Refused(Unroutable("gone")))

    assert [(r.outcome, r.attempt, r.num_output_tokens) for r in driver.records] == [
        ("cancelled", 0, 1)
    ]
