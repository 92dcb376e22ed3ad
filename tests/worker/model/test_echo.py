from collections.abc import Sequence

import pytest

from shared.messages import SamplingParams
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId
from worker.model import echo
from worker.model.echo import EchoRunner, next_token

VOCAB_SIZE = 1000


def new_runner(
    *, is_thorough: bool = False, step_s: float = 0.0, token_s: float = 0.0
) -> EchoRunner:
    return EchoRunner(
        num_blocks=8,
        block_size=4,
        vocab_size=VOCAB_SIZE,
        is_thorough=is_thorough,
        step_s=step_s,
        token_s=token_s,
    )


def share(
    token_ids: Sequence[int],
    block_table: Sequence[int],
    *,
    start: int = 0,
    is_sampled: bool = True,
    position: int = 0,
    seed: int = 7,
    choice: int = 0,
    previous_row: int | None = None,
) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=SequenceId("a", choice),
        start=start,
        token_ids=token_ids,
        block_tables=[block_table],
        is_sampled=is_sampled,
        sampling=SamplingParams(),
        seed=seed,
        position=position,
        previous_row=previous_row,
    )


def step(runner: EchoRunner, *shares: ScheduledSequence) -> list[int]:
    return runner.launch(ScheduledBatch(shares)).result()


def test_the_next_token_is_a_function_of_all_tokens_before_it() -> None:
    assert step(new_runner(), share([5, 6, 7], [3])) == [next_token([5, 6, 7], 7, 0, 0, VOCAB_SIZE)]


@pytest.mark.parametrize(
    "other",
    [
        share([4, 6, 7], [0]),
        share([5, 6, 7], [0], seed=8),
        share([5, 6, 7], [0], choice=1),
        share([5, 6, 7], [0], position=1),
    ],
    ids=["context", "seed", "choice", "position"],
)
def test_whatever_decides_a_draw_changes_it(other: ScheduledSequence) -> None:
    assert step(new_runner(), other) != step(new_runner(), share([5, 6, 7], [0]))


def test_chunks_give_the_token_of_the_whole() -> None:
    runner = new_runner()

    first = step(runner, share([1, 2, 3, 4, 5], [6, 2], is_sampled=False))
    last = step(runner, share([6, 7], [6, 2], start=5))

    assert first == []
    assert last == [next_token([1, 2, 3, 4, 5, 6, 7], 7, 0, 0, VOCAB_SIZE)]


def test_a_placeholder_stands_for_a_row_of_the_step_before() -> None:
    runner = new_runner()
    drawn = step(runner, share([1], [0]), share([2], [1]))

    after = step(runner, share([0], [1], start=1, position=1, previous_row=1))

    assert after == [next_token([2, drawn[1]], 7, 0, 1, VOCAB_SIZE)]


def test_a_slot_that_was_given_to_another_changes_the_token() -> None:
    runner = new_runner()
    step(runner, share([1, 2, 3], [0]))
    step(runner, share([9, 9, 9], [0]))

    assert step(runner, share([4], [0], start=3)) != [next_token([1, 2, 3, 4], 7, 0, 0, VOCAB_SIZE)]


def test_a_thorough_runner_finds_any_slot_of_the_context_that_was_overwritten() -> None:
    runner = new_runner(is_thorough=True)
    step(runner, share([1, 2, 3, 4, 5], [0, 1]))
    step(runner, share([9], [0]))

    with pytest.raises(ValueError, match="the slot of token 1 holds another"):
        step(runner, share([6], [0, 1], start=5))


def test_a_thorough_runner_refuses_two_writers_of_one_slot() -> None:
    with pytest.raises(ValueError, match="the same slot"):
        step(new_runner(is_thorough=True), share([1], [0]), share([2], [0]))


def test_a_slot_that_was_never_written_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="the slot of token 2 is empty"):
        step(new_runner(), share([1], [0], start=3))


@pytest.mark.parametrize("block_table", [[0], [0, 1, 2]])
def test_a_block_table_covers_the_context_and_no_more(block_table: list[int]) -> None:
    with pytest.raises(ValueError, match="for a context of 5 tokens"):
        step(new_runner(), share([1, 2, 3, 4, 5], block_table))


def test_a_share_has_tokens() -> None:
    with pytest.raises(ValueError, match="no tokens in this step"):
        step(new_runner(), share([], [0]))


def test_tokens_spread_over_the_vocabulary() -> None:
    drawn = {next_token([k], 0, 0, 0, 64) for k in range(1000)}

    assert drawn == set(range(64))


class Clock:
    """The time of the runner, which passes while it sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_steps_take_their_time_one_after_another_while_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(echo, "time", clock)
    runner = new_runner(step_s=0.02, token_s=0.005)

    handles = [runner.launch(ScheduledBatch([share([1, 2], [0])])) for _ in range(10)]
    launched_at = clock.now
    handles[-1].result()

    assert launched_at == 0
    assert clock.now == pytest.approx(10 * (0.02 + 2 * 0.005))
