"""The fate of job and log: every combination of facts is in a single row of this table."""

from itertools import product
from typing import TypeAlias

import pytest

from gateway.log.cursor import Departure, Fate, LogEnd, Retention, departure_of, fate_of
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    IdempotencyMismatch,
    InternalError,
    StreamExpired,
    StreamNotFound,
    TakenOver,
    Unavailable,
    WarrenError,
)

ANY_END, ANY_RETENTION, ANY = tuple(LogEnd), tuple(Retention), (False, True)
OPEN, FINISHED, FAILED = ((end,) for end in LogEnd)
ENDED = FINISHED + FAILED
NONE, GRACE, KEPT = ((retention,) for retention in Retention)
YES, NO = (True,), (False,)

Row: TypeAlias = tuple[
    Departure, tuple[LogEnd, ...], tuple[Retention, ...], tuple[bool, ...], tuple[bool, ...], Fate
]
TABLE: list[Row] = [
    # departure, end of the log, retention, has a key, is detached, fate
    (Departure.DISPLACED, ANY_END, ANY_RETENTION, ANY, ANY, Fate.STAYS),
    (Departure.DRAINED, ANY_END, ANY_RETENTION, ANY, ANY, Fate.STAYS),
    (Departure.ABORTED, ANY_END, ANY_RETENTION, ANY, ANY, Fate.ENDS),
    # A client that can return finds what there is.
    (Departure.LEFT, OPEN, ANY_RETENTION, ANY, NO, Fate.WAITS),
    (Departure.LEFT, OPEN, ANY_RETENTION, ANY, YES, Fate.STAYS),
    (Departure.LEFT, ENDED, ANY_RETENTION, ANY, ANY, Fate.STAYS),
    # One that was sent no id can return only with its key.
    (Departure.ABANDONED, ANY_END, ANY_RETENTION, NO, ANY, Fate.ENDS),
    (Departure.ABANDONED, OPEN, ANY_RETENTION, YES, NO, Fate.WAITS),
    (Departure.ABANDONED, OPEN, ANY_RETENTION, YES, YES, Fate.STAYS),
    (Departure.ABANDONED, ENDED, ANY_RETENTION, YES, ANY, Fate.STAYS),
    # An answer that broke off.
    (Departure.SERVED, OPEN, ANY_RETENTION, ANY, ANY, Fate.ENDS),
    (Departure.REFUSED, OPEN, ANY_RETENTION, ANY, ANY, Fate.ENDS),
    # A retry with the same key may be answered differently.
    (Departure.SERVED, FAILED, ANY_RETENTION, YES, NO, Fate.ENDS),
    (Departure.REFUSED, FAILED, ANY_RETENTION, YES, NO, Fate.ENDS),
    *(
        row
        for end, has_key, is_detached in [
            (FINISHED, ANY, ANY),
            (FAILED, NO, ANY),
            (FAILED, YES, YES),
        ]
        for row in [
            (Departure.SERVED, end, NONE, has_key, is_detached, Fate.ENDS),
            (Departure.SERVED, end, GRACE, has_key, is_detached, Fate.WAITS),
            (Departure.SERVED, end, KEPT, has_key, is_detached, Fate.STAYS),
            (Departure.REFUSED, end, NONE + GRACE, has_key, is_detached, Fate.ENDS),
            (Departure.REFUSED, end, KEPT, has_key, is_detached, Fate.STAYS),
        ]
    ),
]


def test_the_table_decides_every_fate() -> None:
    expected = [
        ((departure, *facts), fate)
        for departure, ends, retentions, has_key, is_detached, fate in TABLE
        for facts in product(ends, retentions, has_key, is_detached)
    ]

    assert len(expected) == len(dict(expected))
    assert dict(expected).keys() == set(product(Departure, LogEnd, Retention, ANY, ANY))
    for facts, fate in expected:
        departure, end, retention, has_key, is_detached = facts
        decided = fate_of(departure, end, retention, has_key=has_key, is_detached=is_detached)
        assert decided is fate, facts


@pytest.mark.parametrize("said", Departure)
@pytest.mark.parametrize("error", [None, TakenOver("x"), Unavailable("x"), Cancelled("x")])
def test_a_log_that_was_never_held_is_anothers(said: Departure, error: WarrenError | None) -> None:
    assert departure_of(said, error, is_ours=False) is Departure.DISPLACED


@pytest.mark.parametrize("said", Departure)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TakenOver, Departure.DISPLACED),
        (StreamNotFound, Departure.DISPLACED),
        (StreamExpired, Departure.DISPLACED),
        (IdempotencyMismatch, Departure.DISPLACED),
        (Cancelled, Departure.ABORTED),
        (DeadlineExceeded, Departure.ABORTED),
        (InternalError, Departure.ABORTED),
    ],
)
def test_an_error_of_the_reading_outweighs_what_was_said(
    said: Departure, kind: type[WarrenError], expected: Departure
) -> None:
    assert departure_of(said, kind("x"), is_ours=True) is expected


@pytest.mark.parametrize("said", Departure)
def test_a_gateway_that_ends_keeps_the_streams_whose_clients_can_return(said: Departure) -> None:
    can_return = said in (Departure.SERVED, Departure.LEFT)

    decided = departure_of(said, Unavailable("x"), is_ours=True)

    assert decided is (Departure.DRAINED if can_return else Departure.ABANDONED)


@pytest.mark.parametrize("said", Departure)
def test_without_an_error_it_is_what_was_said(said: Departure) -> None:
    assert departure_of(said, None, is_ours=True) is said
