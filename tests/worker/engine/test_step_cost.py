"""The cost model that is learned from measured steps."""

import random
from collections.abc import Callable

import pytest

from tests.worker.engine.simulation import two_cores
from worker.engine.step_cost import StepCost, StepWork


def random_work(rng: random.Random) -> StepWork:
    """Decodes, sometimes with a chunk of a prompt beside them."""
    work = StepWork()
    for _ in range(rng.randint(1, 40)):
        work.add(rng.randrange(100, 1000), 1)
    if rng.random() < 0.4:
        work.add(rng.randrange(0, 3000), rng.randint(16, 400))
    return work


def learned(
    rng: random.Random, seconds: Callable[[StepWork], float], num_steps: int, cost: StepCost
) -> StepCost:
    for _ in range(num_steps):
        work = random_work(rng)
        cost.learn(work, seconds(work))
    return cost


def mean_error(cost: StepCost, seconds: Callable[[StepWork], float]) -> float:
    """The errors for new steps, relative to their time."""
    rng = random.Random(99)
    works = [random_work(rng) for _ in range(200)]
    return sum(abs(cost.seconds(work) / seconds(work) - 1) for work in works) / len(works)


@pytest.mark.parametrize("seed", range(5))
def test_it_predicts_steps_that_it_has_not_seen(seed: int) -> None:
    rng = random.Random(seed)

    cost = learned(rng, lambda work: two_cores(work) * rng.lognormvariate(0, 0.1), 150, StepCost())

    assert mean_error(cost, two_cores) < 0.12


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_were_disturbed_hardly_count(seed: int) -> None:
    rng = random.Random(seed)

    def disturbed(work: StepWork) -> float:
        return two_cores(work) * (20 if rng.random() < 0.1 else 1)

    cost = learned(rng, disturbed, 150, StepCost())

    assert mean_error(cost, two_cores) < 0.12


def test_a_first_step_that_took_very_long_is_forgotten() -> None:
    cost = StepCost()
    first = StepWork()
    first.add(0, 128)
    cost.learn(first, 5.0)

    learned(random.Random(1), two_cores, 60, cost)

    assert mean_error(cost, two_cores) < 0.12


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_it_follows_a_machine_that_changes_its_pace(factor: float) -> None:
    rng = random.Random(2)
    cost = learned(rng, two_cores, 150, StepCost())

    learned(rng, lambda work: factor * two_cores(work), 150, cost)

    assert mean_error(cost, lambda work: factor * two_cores(work)) < 0.12


def test_prices_of_prompts_outlast_any_number_of_decodes() -> None:
    cost = learned(random.Random(3), two_cores, 100, StepCost())
    prompt = StepWork()
    prompt.add(200, 300)
    before = cost.seconds(prompt)

    for _ in range(20_000):
        decode = StepWork()
        decode.add(300, 1)
        cost.learn(decode, two_cores(decode))

    assert cost.seconds(prompt) == pytest.approx(before, rel=0.3)


def test_what_one_step_does_not_distinguish_is_the_prompts_cost() -> None:
    cost = StepCost()
    work = StepWork()
    work.add(0, 128)

    cost.learn(work, 0.128)

    assert cost.num_prompt_tokens(start=0, seconds=0.064) == pytest.approx(64, rel=0.05)


def test_nothing_is_predicted_before_the_first_step() -> None:
    assert StepCost().num_prompt_tokens(start=0, seconds=1.0) == 0


@pytest.mark.parametrize("start", [0, 500, 4000])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 1.0])
def test_so_many_tokens_take_so_long(start: int, seconds: float) -> None:
    cost = learned(random.Random(4), two_cores, 100, StepCost())
    nothing, chunk = StepWork(), StepWork()
    num_tokens = cost.num_prompt_tokens(start, seconds)

    chunk.num_prompt_tokens = 1  # costs are linear in these two, which need not be integers
    chunk.num_prompt_pairs = start + (num_tokens + 1) / 2
    each = cost.seconds(chunk) - cost.seconds(nothing)

    assert num_tokens * each == pytest.approx(seconds, rel=1e-6)
