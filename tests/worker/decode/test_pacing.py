"""How events keep to their share of a core."""

import pytest

from worker.decode.bridge import EventPacing


class Machine:
    """An engine with steps of ``step_s``, each token event of which takes ``event_s`` of CPU."""

    def __init__(self, *, step_s: float, event_s: float, max_delay_s: float = 0.1) -> None:
        self.now_s = self.cpu_s = 0.0
        self._step_s = step_s
        self._event_s = event_s
        self.pacing = EventPacing(
            0.05, max_delay_s, clock=lambda: self.now_s, cpu_clock=lambda: self.cpu_s
        )

    def run(self, num_streams: int, for_s: float = 10.0) -> float:
        """The share of a core that events take in the end."""
        until_s, share = self.now_s + for_s, 0.0
        while self.now_s < until_s:
            share = num_streams * self._event_s / self.pacing.num_gathered / self._step_s
            self.now_s += self._step_s
            self.cpu_s += share * self._step_s
            self.pacing.step()
        return share


def test_tokens_do_not_wait_while_their_events_take_little() -> None:
    machine = Machine(step_s=0.02, event_s=0.0004)

    machine.run(num_streams=2)

    assert machine.pacing.num_gathered == 1


@pytest.mark.parametrize("num_streams", [4, 8, 12])
def test_events_keep_to_their_share(num_streams: int) -> None:
    machine = Machine(step_s=0.02, event_s=0.0004)

    share = machine.run(num_streams)

    assert 0.02 < share <= 0.08


def test_no_token_waits_for_longer_than_the_longest_delay() -> None:
    machine = Machine(step_s=0.03, event_s=0.01)

    machine.run(num_streams=100)

    assert machine.pacing.num_gathered == 4


def test_slow_steps_are_not_gathered() -> None:
    machine = Machine(step_s=0.2, event_s=0.01)

    machine.run(num_streams=100)

    assert machine.pacing.num_gathered == 1


def test_tokens_are_sent_one_by_one_again_when_the_load_is_gone() -> None:
    machine = Machine(step_s=0.02, event_s=0.0004)
    machine.run(num_streams=12)

    machine.run(num_streams=1)

    assert machine.pacing.num_gathered == 1
