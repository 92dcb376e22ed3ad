"""The pauses between attempts grow while attempts fail, and are bounded."""

from shared.backoff import Backoff


def test_pauses_double_while_one_attempt_after_the_other_soon_fails() -> None:
    backoff = Backoff(0.05, 0.8)
    pauses_s = [backoff.pause_s]

    for lasted_s in (60.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        backoff.lasted(lasted_s)
        pauses_s.append(backoff.pause_s)

    assert pauses_s == [0.05, 0.05, 0.05, 0.1, 0.2, 0.05, 0.05]


def test_no_pause_is_longer_than_the_longest() -> None:
    assert Backoff(1, 60, num_failed=7).pause_s == 60
    assert Backoff(1, 60, num_failed=10_000).pause_s == 60


def test_a_drawn_pause_is_at_least_half_of_the_pause() -> None:
    backoff = Backoff(1, 60, num_failed=3)

    assert all(2 <= backoff.drawn_pause_s <= 4 for _ in range(100))
