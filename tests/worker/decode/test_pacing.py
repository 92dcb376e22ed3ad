"""When the events of a stream are due."""

import math

import pytest

from worker.decode.bridge import EventPace


def event_times(pace: EventPace, token_times: list[float]) -> list[float]:
    """When events leave, the last event with the token that arrived last."""
    times: list[float] = []
    waits_since: float | None = None
    for at in [*token_times, math.inf]:
        if waits_since is not None and pace.due_at_latest <= at:
            times.append(pace.due_at_latest)
            pace.sent(times[-1])
            waits_since = None
        if at == math.inf:
            break
        if pace.arrived(at):
            times.append(at)
            pace.sent(at)
            waits_since = None
        elif waits_since is None:
            waits_since = at
    return times


def every(step_s: float, num_tokens: int) -> list[float]:
    return [k * step_s for k in range(num_tokens)]


def test_the_first_tokens_leave_at_once() -> None:
    token_times = every(0.005, 30)

    times = event_times(EventPace(10, num_at_once=10), token_times)

    assert times[:10] == token_times[:10]
    assert len(times) == 12


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03, 0.05, 0.06, 0.08, 0.095])
def test_a_fast_stream_keeps_to_its_events_per_second(step_s: float) -> None:
    token_times = every(step_s, int(20 / step_s))

    times = event_times(EventPace(10, num_at_once=1), token_times)

    assert 130 <= len(times) <= 202


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03, 0.05, 0.06, 0.08, 0.095])
def test_no_token_waits_much_longer_than_an_interval(step_s: float) -> None:
    token_times = every(step_s, int(20 / step_s))

    times = event_times(EventPace(10, num_at_once=1), token_times)

    waits = [min(time for time in times if time >= at) - at for at in token_times]
    assert max(waits) <= 0.151
    assert sorted(waits)[len(waits) // 2] <= 0.1


def test_each_token_of_a_slow_stream_leaves_at_once() -> None:
    token_times = every(0.1, 100)

    assert event_times(EventPace(10, num_at_once=1), token_times) == token_times


def test_a_pace_without_a_limit_lets_each_token_leave_at_once() -> None:
    token_times = every(0.001, 100)

    assert event_times(EventPace(math.inf, num_at_once=1), token_times) == token_times
