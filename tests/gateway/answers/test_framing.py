"""The ids of events: a client that comes back with any of them misses and repeats nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers.framing import START, EventId, Framer, frame_unnumbered
from gateway.answers.sse import Payload
from shared.errors import InvalidRequest

PAYLOADS = st.lists(st.integers(0, 3), max_size=12)


def frames(counts: list[int], num_last: int, after: EventId = START) -> list[tuple[str, str]]:
    """The ids and data of a log whose k-th event has ``counts[k]`` payloads, and of its end."""
    framer, number, sent = Framer(after), iter(range(1000)), b""
    sent += framer.frame(0, [Payload(b"open %d" % next(number))])
    for ordinal, count in enumerate(counts, 1):
        payloads = [Payload(b"%d" % next(number), "name") for _ in range(count)]
        sent += framer.frame(ordinal, payloads)
    sent += framer.frame_between([Payload(b"%d" % next(number)) for _ in range(num_last)])
    return re.findall(r"id: (\S+)\n(?:event: name\n)?data: (.+)\n\n", sent.decode())


@given(counts=PAYLOADS, num_last=st.integers(0, 2), data=st.data())
def test_whoever_comes_back_with_an_id_gets_exactly_what_follows(
    counts: list[int], num_last: int, data: st.DataObject
) -> None:
    whole = frames(counts, num_last)
    place = data.draw(st.integers(0, len(whole) - 1))

    rest = frames(counts, num_last, after=EventId.parse(whole[place][0]))

    assert rest == whole[place + 1 :]
    assert len(whole) == 1 + sum(counts) + num_last
    assert len({event_id for event_id, _ in whole}) == len(whole)


@given(counts=PAYLOADS)
def test_the_last_payload_of_an_event_bears_its_number_alone(counts: list[int]) -> None:
    ids = [event_id for event_id, _ in frames(counts, 0)]

    assert [i for i in ids if "." not in i] == [str(k) for k, n in enumerate(counts, 1) if n]


def test_an_event_without_an_id_may_say_when_to_come_back() -> None:
    frame = frame_unnumbered(Payload(b"{}"), retry_ms=500)

    assert frame == b"retry: 500\ndata: {}\n\n"


@pytest.mark.parametrize("text", ["x", "-1", "1.", ".1", "1.2.3", "1e3", "١", "9" * 16, " 1"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        EventId.parse(text)


def test_no_id_is_the_start() -> None:
    assert EventId.parse("") == START
