"""Drawn tokens follow the distribution of their row, whatever else is in the batch."""

import collections
import itertools

import pytest
import torch
from torch import Tensor

from kernels.providers import load_ops
from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from worker.model.inputs import build_inputs
from worker.model.sampling.sampler import SamplingInputs, sample, uniform

OPS = load_ops()
NUM_DRAWS = 20_000
CRITICAL = {3: 21.1, 10: 35.6, 15: 44.3}
"""Chi-square by degrees of freedom, for a probability of 1 in 10,000."""


def inputs_for(rows: list[tuple[SamplingParams, int]]) -> SamplingInputs | None:
    """Sampling inputs for rows with these seeds, as in a step."""
    shares = [share([1], [0], sampling=sampling, seed=seed, position=7) for sampling, seed in rows]
    return build_inputs(batch(*shares), 4, torch.device("cpu")).sampling


def chi_square(counts: list[int], expected: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, expected, strict=True))


def draw(logits: Tensor, sampling: SamplingParams) -> collections.Counter[int]:
    inputs = inputs_for([(sampling, seed) for seed in range(NUM_DRAWS)])
    return collections.Counter(sample(OPS, logits.expand(NUM_DRAWS, -1), inputs).tolist())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_draws_follow_the_softmax_at_their_temperature(temperature: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(11)
    counts = draw(logits, SamplingParams(temperature=temperature))
    expected = (logits.double() / temperature).softmax(dim=-1).tolist()
    assert chi_square([counts[token] for token in range(11)], expected) < CRITICAL[10]
    uniform_instead = [1 / 11] * 11
    assert chi_square([counts[token] for token in range(11)], uniform_instead) > CRITICAL[10]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_k=4), SamplingParams(top_p=0.75), SamplingParams(top_k=4, top_p=0.99)],
)
def test_filtered_draws_follow_what_is_left(sampling: SamplingParams) -> None:
    shares = [0.3, 0.25, 0.15, 0.1, 0.08, 0.07, 0.05]
    counts = draw(torch.tensor(shares).log(), sampling)
    assert set(counts) == {0, 1, 2, 3}
    expected = [share / sum(shares[:4]) for share in shares[:4]]
    assert chi_square([counts[token] for token in range(4)], expected) < CRITICAL[3]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    torch.manual_seed(5)
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature, top_k, top_p in itertools.product((0.0, 0.4, 1.6), (0, 9), (1.0, 0.7))
    ]
    rows = [(sampling, seed) for seed in range(20) for sampling in params]
    logits = torch.randn(len(rows), 997) * 4
    together = sample(OPS, logits, inputs_for(rows)).tolist()
    alone = [
        sample(OPS, logits[row : row + 1], inputs_for(rows[row : row + 1])).item()
        for row in range(len(rows))
    ]
    assert together == alone


def test_a_greedy_batch_takes_the_greatest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    assert sample(OPS, logits, None).tolist() == [1, 0]


def test_numbers_are_the_same_on_every_worker_and_version() -> None:
    """A stream continues on another worker with the same random numbers."""
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 3, 9)]
    golden = [2327157, 11635202, 4515257, 3093159, 15930973]
    assert [uniform(*key) * 2**24 for key in keys] == golden


@pytest.mark.parametrize("moving", range(3))
def test_numbers_are_uniform_along_seeds_choices_and_positions(moving: int) -> None:
    keys = [[12345, 2, 77] for _ in range(NUM_DRAWS)]
    for count, key in enumerate(keys):
        key[moving] = count
    numbers = [uniform(*key) for key in keys]
    assert all(0 <= number < 1 for number in numbers)
    for values in (numbers, [(a - b) % 1 for a, b in itertools.pairwise(numbers)]):
        counts = collections.Counter(int(value * 16) for value in values)
        assert chi_square([counts[part] for part in range(16)], [1 / 16] * 16) < CRITICAL[15]
