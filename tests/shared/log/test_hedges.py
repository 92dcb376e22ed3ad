"""Two runs of a request at once: the run that writes first is the log's writer."""

import pytest

from shared.log import LogReader, LogWriter, Relay, Send
from shared.messages import (
    Cancel,
    Continue,
    Failed,
    HandedOver,
    Hedge,
    Replaced,
    ReplyEvent,
    Started,
)

FIRST = Started(worker="worker.a", ticket="a", num_prompt_tokens=(3,))
TOO_LATE = Cancel(request_id="r", ticket="b", is_outrun=True)
FENCE = Cancel(request_id="r", ticket="a", is_replaced=True)


def hedge(num_tokens: int = 0, ticket: str = "b", num_returns: int = 0) -> Started:
    return Started(
        worker="worker.b",
        ticket=ticket,
        num_prompt_tokens=(3,),
        is_waiting=True,
        publication=2,
        num_returns=num_returns,
        hedge=Hedge(number=2, num_tokens=num_tokens),
    )


def sent(reader: LogReader, *log: ReplyEvent) -> list[Cancel | Continue]:
    actions = [action for event in log for action in reader.read(event)]
    commands = [action.command for action in actions if isinstance(action, Send)]
    assert all(isinstance(command, Cancel | Continue) for command in commands)
    return [command for command in commands if isinstance(command, Cancel | Continue)]


def relayed(reader: LogReader, event: ReplyEvent) -> list[ReplyEvent]:
    return [action.event for action in reader.read(event) if isinstance(action, Relay)]


def challenged() -> tuple[LogReader, LogWriter, LogWriter]:
    """A log with a token of the first run, and the writers of that run and of its hedge."""
    reader, first = LogReader("r", 1), LogWriter(1, 1)
    (told,) = sent(reader, FIRST, first.delta(0, [1], "x"), hedge(num_tokens=1))
    assert isinstance(told, Continue)
    return reader, first, LogWriter.resume(told)


def test_a_hedge_is_told_where_to_continue_beside_the_run_that_it_hedges() -> None:
    reader = LogReader("r", 1)

    (told,) = sent(reader, FIRST, LogWriter(1, 1).delta(0, [1], "x"), hedge(num_tokens=1))

    assert isinstance(told, Continue)
    assert told.is_contested
    assert told.choices[0].token_ids == (1,)
    assert told.replaced == Replaced(worker="worker.a", ticket="a", reason="outrun")
    assert (reader.worker, reader.attempt) == ("worker.a", 1)


def test_the_hedge_that_writes_first_is_the_writer_and_the_first_run_is_fenced() -> None:
    reader, first, second = challenged()
    event = second.delta(0, [2], "y")

    confirmed, fence = sent(reader, event)

    assert isinstance(confirmed, Continue)
    assert (confirmed.ticket, confirmed.is_contested, confirmed.choices) == ("b", False, ())
    assert fence == FENCE
    assert reader.chains[0].token_ids == [1, 2]
    assert relayed(reader, first.delta(0, [9], "late")) == []


def test_the_hedges_start_is_relayed_with_its_first_tokens() -> None:
    reader, _, second = challenged()
    event = second.finish(0, [2], "y", "stop")

    assert relayed(reader, event) == [hedge(num_tokens=1), event]


def test_the_first_run_that_writes_first_stays_the_writer() -> None:
    reader, first, second = challenged()
    event = first.delta(0, [2], "y")

    assert sent(reader, event) == [TOO_LATE]
    assert relayed(reader, second.delta(0, [2], "y")) == []
    assert reader.chains[0].token_ids == [1, 2]


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_hedge_of_another_position_is_too_late(num_tokens: int) -> None:
    reader = LogReader("r", 1)
    reader.read(FIRST)
    reader.read(LogWriter(1, 1).delta(0, [1], "x"))

    assert sent(reader, hedge(num_tokens)) == [TOO_LATE]


def test_a_hedge_that_starts_before_any_other_run_is_the_writer() -> None:
    reader = LogReader("r", 1)

    (told,) = sent(reader, hedge())
    (late,) = sent(reader, FIRST)

    assert isinstance(told, Continue)
    assert not told.is_contested
    assert late == Cancel(request_id="r", ticket="a")


def test_the_failure_of_a_hedge_that_is_not_the_writer_does_not_count() -> None:
    reader, first, second = challenged()

    assert relayed(reader, second.fail("internal_error", "broken")) == []
    assert relayed(reader, Failed(code="internal_error", message="broken", ticket="b")) == []
    assert relayed(reader, first.delta(0, [2], "y"))


def test_a_run_that_a_hedge_has_outrun_is_no_crash() -> None:
    reader, _, second = challenged()

    reader.read(second.delta(0, [2], "y"))

    assert reader.num_lost_runs == 0
    assert reader.replaced == Replaced(worker="worker.a", ticket="a", reason="outrun")


def test_a_hedge_whose_worker_is_lost_is_a_crash_unless_it_was_handed_over() -> None:
    reader, _, _ = challenged()

    reader.read(hedge(num_tokens=1, ticket="c", num_returns=1))
    num_lost = reader.num_lost_runs
    reader.read(HandedOver(ticket="b"))

    assert (num_lost, reader.num_lost_runs) == (1, 0)


def test_the_next_run_of_a_hedge_that_was_the_writer_takes_over_at_once() -> None:
    reader, _, second = challenged()
    reader.read(second.delta(0, [2], "y"))

    told, fence = sent(reader, hedge(num_tokens=1, ticket="c", num_returns=1))

    assert isinstance(told, Continue)
    assert not told.is_contested
    assert told.choices[0].token_ids == (1, 2)
    assert fence == Cancel(request_id="r", ticket="b", is_replaced=True)


def test_a_run_that_takes_the_job_over_ends_the_race() -> None:
    reader, _, _ = challenged()
    successor = Started(
        worker="worker.c", ticket="c", num_prompt_tokens=(3,), is_waiting=True, num_returns=1
    )

    told, *fences = sent(reader, successor)

    assert isinstance(told, Continue)
    assert told.attempt > 2
    assert fences == [FENCE, TOO_LATE]


def test_the_end_of_the_request_stops_the_hedge() -> None:
    reader, first, _ = challenged()

    assert sent(reader, first.finish(0, [2], "y", "stop")) == [TOO_LATE]


def test_a_client_that_leaves_stops_both_runs() -> None:
    reader, _, _ = challenged()

    commands = [send.command for send in reader.cancel()]

    assert commands == [Cancel(request_id="r", ticket="a"), TOO_LATE]
