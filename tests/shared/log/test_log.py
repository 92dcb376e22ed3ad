"""The rules of the log: however writers interleave, all readers agree on the stream."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.log import EMPTY_HASH, LogReader, LogWriter, Relay, Send, extend_hash
from shared.log.reader import MAX_EXCUSED
from shared.messages import (
    Accepted,
    Cancel,
    Continue,
    Failed,
    Finished,
    HandedOver,
    Progress,
    PromptScores,
    Replaced,
    ReplyEvent,
    Started,
    TokenDelta,
)

NUMBERS = itertools.count()


def started(worker: str = "worker.a") -> Started:
    """A `Started` of a delivery of its own, newer than all before."""
    number = next(NUMBERS)
    return Started(worker=worker, ticket=f"{number}", num_prompt_tokens=(3,), num_returns=number)


def relayed(reader: LogReader, log: Sequence[ReplyEvent]) -> list[ReplyEvent]:
    actions = [action for event in log for action in reader.read(event)]
    return [a.event for a in actions if isinstance(a, Relay) and not isinstance(a.event, Started)]


def sent(reader: LogReader, event: ReplyEvent) -> list[tuple[str, object]]:
    return [(a.address, a.command) for a in reader.read(event) if isinstance(a, Send)]


def test_an_undisturbed_log_is_relayed_event_by_event() -> None:
    writer, reader = LogWriter(1, 1), LogReader("r", 1)
    log: list[ReplyEvent] = [writer.delta(0, [1], "a"), writer.finish(0, [2], "b", "stop")]

    events = relayed(reader, [started(), *log])

    assert events == log
    assert reader.is_ended
    assert reader.chains[0].token_ids == [1, 2]


def test_events_are_numbered_from_one_and_started_is_not_one_of_them() -> None:
    writer, reader = LogWriter(1, 1), LogReader("r", 1)

    log = (started(), writer.delta(0, [1], "a"), writer.delta(0, [2], "b"))

    ordinals = [
        action.ordinal
        for event in log
        for action in reader.read(event)
        if isinstance(action, Relay)
    ]

    assert ordinals == [0, 1, 2]


def test_a_repeated_event_is_relayed_once() -> None:
    writer, reader = LogWriter(1, 1), LogReader("r", 1)
    event = writer.delta(0, [1], "a")

    assert relayed(reader, [started(), event, event]) == [event]


def test_an_event_after_a_gap_is_dropped() -> None:
    writer, reader = LogWriter(1, 1), LogReader("r", 1)
    writer.delta(0, [1], "a")
    after_gap = writer.delta(0, [2], "b")

    assert relayed(reader, [started(), after_gap]) == []


def test_other_tokens_of_the_same_length_are_distinguished_by_their_hash() -> None:
    reader, ours, theirs = LogReader("r", 1), LogWriter(1, 1), LogWriter(1, 1)
    first = ours.delta(0, [1], "a")
    theirs.delta(0, [9], "z")
    splice = theirs.delta(0, [2], "b")

    assert relayed(reader, [started(), first, splice]) == [first]


def test_the_second_started_is_answered_with_continue_and_fences_the_first() -> None:
    reader, writer = LogReader("r", 1), LogWriter(1, 1)
    first, second = started("worker.a"), started("worker.b")
    relayed(reader, [first, writer.delta(0, [1, 2], "ab")])

    answers = sent(reader, second)

    (new, command), (old, cancel) = answers
    assert (old, cancel) == (
        "worker.a",
        Cancel(request_id="r", ticket=first.ticket, is_replaced=True),
    )
    assert new == "worker.b"
    assert isinstance(command, Continue)
    assert command.ticket == second.ticket
    assert (command.attempt, command.choices[0].token_ids) == (2, (1, 2))


def test_a_repeated_started_is_no_new_attempt() -> None:
    """The publisher did not receive the confirmation."""
    reader, event = LogReader("r", 1), started()

    assert sent(reader, event) == sent(reader, event) == []
    assert (reader.attempt, reader.num_crashes) == (1, 0)


def test_a_started_that_waits_is_answered_each_time() -> None:
    """The answer is lost if it arrives while the worker is disconnected."""
    reader = LogReader("r", 1)
    waiting = Started(worker="worker.b", ticket="t", num_prompt_tokens=(3,), is_waiting=True)

    answers = sent(reader, waiting)

    assert sent(reader, waiting) == answers != []
    assert (reader.attempt, reader.num_crashes) == (2, 0)


def test_a_first_started_that_waits_is_answered_with_continue() -> None:
    """The worker that had the job before died without writing an event."""
    reader = LogReader("r", 1)

    waiting = Started(worker="worker.b", ticket="t", num_prompt_tokens=(3,), is_waiting=True)
    answers = sent(reader, waiting)

    assert answers == [
        ("worker.b", Continue(request_id="r", ticket="t", attempt=2, choices=(Progress(),)))
    ]


def test_a_fenced_worker_cannot_write_or_end_the_stream() -> None:
    reader, zombie = LogReader("r", 1), LogWriter(1, 1)
    relayed(reader, [started("worker.a"), zombie.delta(0, [1], "a"), started("worker.b")])

    late: list[ReplyEvent] = [
        zombie.delta(0, [2], "b"),
        zombie.fail("x", "m"),
        zombie.finish(0, [], "", "stop"),
    ]

    assert relayed(reader, late) == []
    assert not reader.is_ended


def test_the_next_worker_goes_on_where_the_reader_stands() -> None:
    reader, first = LogReader("r", 2), LogWriter(1, 2)
    relayed(reader, [started(), first.delta(0, [1], "a"), first.finish(1, [7], "q", "length")])
    (_, command), (_, _) = sent(reader, started("worker.b"))
    assert isinstance(command, Continue)

    second = LogWriter.resume(command)
    events = relayed(reader, [second.finish(0, [2], "b", "stop")])

    assert len(events) == 1
    assert reader.is_ended
    assert [chain.token_ids for chain in reader.chains] == [[1, 2], [7]]


def test_nothing_of_an_earlier_execution_counts() -> None:
    reader, theirs, ours = LogReader("r", 1), LogWriter(1, 1, 1), LogWriter(1, 1, 2)
    left = Started(worker="worker.a", ticket="left", num_prompt_tokens=(1,), execution=1)
    current = Started(worker="worker.b", ticket="t", num_prompt_tokens=(1,), execution=2)
    scores = PromptScores(
        prompt=0, attempt=1, start=0, token_ids=(5,), logprobs=(None,), execution=1
    )
    reader.read(Accepted(body_hash="h", execution=2))

    answers = sent(reader, left)
    late: list[ReplyEvent] = [
        Failed(code="deadline_exceeded", message="late", execution=1),
        scores,
        theirs.delta(0, [1], "theirs"),
        theirs.finish(0, [2], "theirs", "stop"),
        left,
    ]
    events: list[ReplyEvent] = [ours.delta(0, [3], "a"), ours.finish(0, [4], "b", "stop")]

    passed = relayed(reader, [late[0], current, *late[1:], events[0], *late, events[1]])

    assert answers == [("worker.a", Cancel(request_id="r", ticket="left", is_foreign=True))]
    assert passed == events


def test_a_job_with_an_execution_is_foreign_until_its_request_is_accepted() -> None:
    reader, ours = LogReader("r", 1), LogWriter(1, 1, 2)
    left = Started(worker="worker.a", ticket="left", num_prompt_tokens=(1,), execution=1)
    start = Started(worker="worker.b", ticket="t", num_prompt_tokens=(1,), execution=2)
    failed = Failed(code="deadline_exceeded", message="late", execution=1)
    end = ours.finish(0, [1], "a", "stop")

    passed = relayed(reader, [left, failed, Accepted(body_hash="h", execution=2), start, left, end])

    assert passed == [end]


def test_a_hand_over_is_not_a_crash() -> None:
    crashed, drained = LogReader("r", 1), LogReader("r", 1)

    relayed(crashed, [started(), started()])
    first = started()
    relayed(drained, [first, HandedOver(ticket=first.ticket), started()])

    assert (crashed.num_crashes, drained.num_crashes) == (1, 0)


def test_a_run_that_was_lost_after_tokens_is_not_a_crash() -> None:
    reader, first, idle = LogReader("r", 1), started(), started()

    relayed(reader, [first, LogWriter(1, 1).delta(0, [1], "a"), idle, started()])

    assert (reader.num_lost_runs, reader.num_crashes) == (2, 1)


def test_only_the_first_runs_that_were_lost_after_tokens_are_excused() -> None:
    reader, writer = LogReader("r", 1), LogWriter(1, 1)

    for attempt in range(1, MAX_EXCUSED + 4):
        writer.attempt = attempt
        relayed(reader, [started(), writer.delta(0, [attempt], "a")])

    assert (reader.num_lost_runs, reader.num_crashes) == (MAX_EXCUSED + 2, 2)


def test_a_run_whose_tokens_came_too_late_is_a_crash() -> None:
    reader, late = LogReader("r", 1), LogWriter(1, 1).delta(0, [1], "a")

    relayed(reader, [started(), started(), late, started()])

    assert reader.num_crashes == 2


def test_a_refusal_before_any_start_ends_the_stream() -> None:
    reader = LogReader("r", 1)
    refusal = Failed(code="context_length_exceeded", message="m")

    assert relayed(reader, [refusal]) == [refusal]
    assert reader.is_ended


def test_a_refusal_cannot_end_a_stream_that_has_tokens() -> None:
    reader, writer = LogReader("r", 1), LogWriter(1, 1)
    relayed(reader, [started(), writer.delta(0, [1], "a")])

    assert relayed(reader, [Failed(code="deadline_exceeded", message="m")]) == []


def test_a_run_that_waits_can_end_a_stream_that_has_tokens_while_it_is_its_turn() -> None:
    reader, writer = LogReader("r", 1), LogWriter(1, 1)
    older, newer = started("worker.a"), started("worker.b")
    failures = [
        Failed(code="deadline_exceeded", message="m", ticket=run.ticket) for run in (older, newer)
    ]

    accepted = relayed(reader, [older, writer.delta(0, [1], "a"), newer, *failures])

    assert accepted[1:] == failures[1:]
    assert reader.is_ended


def test_nothing_is_relayed_after_the_end() -> None:
    reader, writer = LogReader("r", 1), LogWriter(1, 1)
    relayed(reader, [started(), writer.finish(0, [], "", "stop")])

    assert relayed(reader, [started("worker.b"), Failed(code="x", message="m")]) == []


def test_the_first_accepted_body_counts() -> None:
    reader = LogReader("r", 1)

    relayed(reader, [Accepted(body_hash="one"), Accepted(body_hash="two")])

    assert reader.body_hash == "one"


def test_cancel_goes_to_the_worker_that_runs_the_request() -> None:
    reader = LogReader("r", 1)
    assert reader.cancel() == []
    first, last = started("worker.a"), started("worker.b")
    relayed(reader, [first, last])

    assert reader.cancel() == [Send("worker.b", Cancel(request_id="r", ticket=last.ticket))]


def test_the_hash_depends_on_every_token_and_their_order() -> None:
    hashes = {extend_hash(EMPTY_HASH, ids) for ids in [(), (0,), (0, 0), (1, 2), (2, 1), (12,)]}

    assert len(hashes) == 6
    assert all(0 <= value < 1 << 64 for value in hashes)


@given(st.integers(0, 2**32 - 1))
def test_readers_agree_and_tokens_survive_any_number_of_takeovers(seed: int) -> None:
    """Workers die, continue as zombies and write into the same log at random. Each continuation
    draws tokens of its own, so that a wrong splice shows."""
    rng = random.Random(seed)
    live, log = LogReader("r", 1), list[ReplyEvent]()
    writers: list[LogWriter] = []

    def append(event: ReplyEvent) -> None:
        log.append(event)
        commands = [action.command for action in live.read(event) if isinstance(action, Send)]
        writers.extend(LogWriter.resume(c) for c in commands if isinstance(c, Continue))

    append(started())
    writers.append(LogWriter(1, 1))
    for _ in range(rng.randrange(40)):
        writer = rng.choice(writers)
        if rng.random() < 0.2:
            append(started(f"worker.{len(log)}"))
        elif not writer.is_ended:
            append(writer.delta(0, [rng.randrange(4) for _ in range(rng.randrange(3))], "t"))
    if not writers[-1].is_ended:
        append(writers[-1].finish(0, [5], "end", "stop"))

    replayed = LogReader("r", 1)
    events = relayed(replayed, log)

    assert (
        replayed.chains[0].token_ids == live.chains[0].token_ids == writers[-1].chains[0].token_ids
    )
    assert [t for e in events if isinstance(e, TokenDelta | Finished) for t in e.token_ids] == (
        live.chains[0].token_ids
    )
    assert live.is_ended


def suspect(publication: int = 1, num_returns: int = 0, *, is_alone: bool = True) -> Started:
    return Started(
        worker="worker.a",
        ticket=f"{next(NUMBERS)}",
        num_prompt_tokens=(3,),
        is_waiting=True,
        publication=publication,
        num_returns=num_returns,
        is_alone=is_alone,
    )


def num_crashes_alone(log: Sequence[ReplyEvent], last: Started) -> int:
    reader = LogReader("r", 1)
    relayed(reader, log)
    (command,) = [one for _, one in sent(reader, last) if isinstance(one, Continue)]
    return command.num_crashes_alone


def test_only_a_crash_alone_of_the_same_publication_counts_as_one() -> None:
    first, again = suspect(), suspect(num_returns=1)
    in_company = suspect(is_alone=False)

    assert num_crashes_alone([started(), started(), first], again) == 1
    assert num_crashes_alone([started(), started(), started()], first) == 0
    assert num_crashes_alone([started(), in_company], first) == 0
    assert num_crashes_alone([first], suspect(publication=2)) == 0
    assert num_crashes_alone([first, HandedOver(ticket=first.ticket)], again) == 0
    assert num_crashes_alone([first, LogWriter(2, 1).delta(0, [1], "a")], again) == 0


def test_of_two_runs_of_one_delivery_the_later_one_gives_the_job_back() -> None:
    """The return was not counted, so it is unknown which of them has the job."""
    reader, current, rival = LogReader("r", 1), suspect(), suspect()
    command = sent(reader, current)[-1][1]
    assert isinstance(command, Continue)

    commands = sent(reader, rival)

    give_back = Cancel(request_id="r", ticket=rival.ticket, is_replaced=True)
    assert commands == [("worker.a", give_back)]
    assert len(relayed(reader, [LogWriter.resume(command).finish(0, [1], "a", "stop")])) == 1


def test_a_copy_in_quarantine_is_newer_than_its_equal_in_company() -> None:
    in_company, alone = LogReader("r", 1), LogReader("r", 1)
    started_in_company = suspect(num_returns=3, is_alone=False)

    relayed(in_company, [started_in_company, suspect()])
    relayed(alone, [suspect(), started_in_company])

    assert (in_company.attempt, alone.attempt) == (3, 2)


def test_a_late_hand_over_takes_the_crash_back() -> None:
    reader, first = LogReader("r", 1), started()

    relayed(reader, [first, started()])
    assert reader.num_crashes == 1
    relayed(reader, [HandedOver(ticket=first.ticket)])

    assert reader.num_crashes == 0


def test_a_run_that_the_broker_left_together_with_the_reader_has_not_crashed() -> None:
    first, second, third = started(), started(), started()
    reader = LogReader("r", 1, cut_off={first.ticket})

    relayed(reader, [first, second, third])

    assert reader.num_crashes == 1


def test_scores_of_a_prompt_that_is_not_there_are_dropped() -> None:
    reader = LogReader("r", 2)
    scores = [
        PromptScores(prompt=prompt, attempt=1, start=0, token_ids=(1,), logprobs=(None,))
        for prompt in (1, 2, 4_000_000)
    ]

    assert relayed(reader, [started(), *scores]) == scores[:1]


RIVAL = Started(worker="worker.c", ticket="rival", num_prompt_tokens=(1,))


@pytest.mark.parametrize(
    ("between", "cut_off", "publication", "reason"),
    [
        ([], (), 0, "worker lost"),
        ([], (), 1, "worker silent"),
        ([], ("a",), 0, "connection lost"),
        ([HandedOver(ticket="a")], (), 0, "handed over"),
        ([RIVAL, HandedOver(ticket="rival")], (), 0, "handed over"),
        ([Accepted(body_hash="h")] * 2, (), 1, "requested again"),
        ([Accepted(body_hash="h")] * 2, (), 2, "worker silent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_continues_learns_which_one_it_replaces_and_why(
    between: list[ReplyEvent], cut_off: tuple[str, ...], publication: int, reason: str
) -> None:
    reader = LogReader("r", 1, cut_off)
    first = Started(worker="worker.a", ticket="a", num_prompt_tokens=(1,))
    second = Started(
        worker="worker.b",
        ticket="b",
        num_prompt_tokens=(1,),
        is_waiting=True,
        publication=publication,
        num_returns=1,
    )

    log: list[ReplyEvent] = [first, *between, second]

    actions = [action for event in log for action in reader.read(event)]

    (told,) = [
        action.command
        for action in actions
        if isinstance(action, Send) and isinstance(action.command, Continue)
    ]
    assert told.replaced == Replaced(worker="worker.a", ticket="a", reason=reason)


def test_a_run_that_continues_learns_which_numerics_the_tokens_have() -> None:
    runs = [
        Started(
            worker=f"worker.{numerics}",
            ticket=str(k),
            num_prompt_tokens=(1,),
            is_waiting=k > 0,
            num_returns=k,
            numerics=numerics,
        )
        for k, numerics in enumerate(("a", "b", "c"))
    ]
    reader, told = LogReader("r", 1), []

    for run in runs:
        actions = reader.read(run)
        told += [one.command for one in actions if isinstance(one, Send)]
        if run.numerics == "a":
            reader.read(LogWriter(1, 1).delta(0, [1], "x"))

    continued = [command for command in told if isinstance(command, Continue)]
    assert [command.numerics for command in continued] == ["a", "a"]
