"""What a reading of a log passes on, without a broker."""

import pytest

from gateway.log.cursor import LogCursor, LogEnd, LogFacts, Restarted
from shared.errors import StreamNotFound
from shared.log import LogWriter, Relay
from shared.messages import Accepted, Release, ReplyEvent, Started

CLAIM = Release(request_id="r", reader="g", tenant="a")
STARTED = Started(worker="w", ticket="t", num_prompt_tokens=(1,))


def read(cursor: LogCursor, *events: ReplyEvent) -> list[object]:
    """The kinds of what is passed on."""
    actions = [action for event in events for action in cursor.read(event)]
    return [type(a.event) if isinstance(a, Relay) else type(a) for a in actions]


def test_a_log_that_is_read_again_restarts_with_its_first_event() -> None:
    cursor, end = LogCursor(CLAIM, LogFacts()), LogWriter(1, 1).finish(0, [1], "x", "stop")

    cursor.begin()
    first = read(cursor, STARTED)
    cursor.cut_off()
    cursor.begin()
    second = read(cursor, Accepted(body_hash=""), STARTED, end)

    assert first == [Started]
    assert second == [Restarted, Started, type(end)]
    assert cursor.end is LogEnd.FINISHED


def test_a_reading_that_passed_nothing_on_does_not_restart() -> None:
    cursor = LogCursor(CLAIM, LogFacts())

    for _ in range(2):
        cursor.begin()
        read(cursor, Accepted(body_hash="h"), Accepted(body_hash=""))

    assert read(cursor, STARTED) == [Started]
    assert cursor.num_accepted == 1


def test_an_end_that_the_broker_lost_was_an_end() -> None:
    cursor, failed = LogCursor(CLAIM, LogFacts()), LogWriter(1, 1).fail("worker_lost", "gone")
    cursor.begin()
    read(cursor, STARTED, failed)

    cursor.cut_off()
    cursor.begin()

    assert cursor.end is LogEnd.FAILED
    assert not cursor.reader.is_ended


@pytest.mark.parametrize(
    "context",
    [
        b"",
        b"\xc1",
        LogFacts(tenant="b").encode(),
        LogFacts(tenant="a", num_choices=0).encode(),
        LogFacts(tenant="a", num_choices=10_000_000).encode(),
    ],
)
def test_a_log_with_a_context_of_no_gateway_or_another_tenant_is_not_found(context: bytes) -> None:
    started = Started(worker="w", ticket="t", num_prompt_tokens=(1,), context=context)

    with pytest.raises(StreamNotFound):
        LogCursor(CLAIM, None).read(started)


def test_the_log_says_how_many_choices_there_are() -> None:
    cursor = LogCursor(CLAIM, None)

    read(cursor, Accepted(body_hash="h", context=LogFacts(tenant="a", num_choices=3).encode()))

    assert len(cursor.reader.chains) == 3
    assert cursor.reader.body_hash == "h"
