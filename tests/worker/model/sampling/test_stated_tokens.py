"""Tokens that an answer states are judged by how far they are from being drawn."""

import math
from typing import Any

import pytest
import torch
from msgspec import structs

from kernels.providers import load_ops
from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from worker.engine.interface import Judgement, LogitEdits, ScheduledSequence
from worker.model.inputs import build_inputs
from worker.model.sampling.sampler import sample, uniform
from worker.model.sampling.stated_tokens import judge

OPS = load_ops()
SHARES = [0.1, 0.2, 0.4, 0.3]
"""The probabilities of the tokens, which draw the numbers up to 0.1, 0.3, 0.7 and 1."""
SEED = 4
NUMBER = uniform(SEED, 0, 7)
BEGINS = [0.0, 0.1, 0.3, 0.7]


def stating(token_id: int, sampling: SamplingParams, **more: Any) -> ScheduledSequence:
    """The share of an answer in a step, at the position of `NUMBER`."""
    drawing = share([1], [0], sampling=sampling, seed=SEED, position=7, **more)
    return structs.replace(drawing, stated_ids=[token_id])


def judged(*shares: ScheduledSequence) -> list[Judgement]:
    """The judgements of rows with the probabilities `SHARES`."""
    logits = torch.tensor(SHARES).log().repeat(len(shares), 1)
    inputs = build_inputs(batch(*shares), 4, torch.device("cpu"))
    assert inputs.stated is not None
    return judge(OPS, logits, inputs.sampling, inputs.edits, inputs.stated).on_host()


@pytest.mark.parametrize("token_id", range(4))
def test_the_margin_is_the_distance_of_the_random_number_to_those_that_draw_the_token(
    token_id: int,
) -> None:
    begin, end = BEGINS[token_id], BEGINS[token_id] + SHARES[token_id]

    (found,) = judged(stating(token_id, SamplingParams()))

    assert found.margin == pytest.approx(max(begin - NUMBER, NUMBER - end, 0.0), abs=1e-6)
    assert found.logprob == pytest.approx(math.log(SHARES[token_id]), abs=1e-6)
    assert found.rank == [4, 3, 1, 2][token_id]


def test_only_the_token_that_is_drawn_has_no_margin() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=3)
    shares = [stating(token_id, sampling) for token_id in range(4)]
    inputs = build_inputs(batch(*shares), 4, torch.device("cpu"))
    drawn = sample(OPS, torch.tensor(SHARES).log().repeat(4, 1), inputs.sampling).tolist()

    margins = [one.margin for one in judged(*shares)]

    assert [token_id for token_id in range(4) if margins[token_id] == 0] == drawn[:1]


def test_a_greedy_token_lags_in_log_probability() -> None:
    greedy = SamplingParams(temperature=0.0)

    found = judged(*(stating(token_id, greedy) for token_id in range(4)))

    margins = [one.margin for one in found]
    assert margins == pytest.approx([math.log(0.4 / share) for share in SHARES], abs=1e-6)


def test_a_token_that_is_left_out_has_the_margin_that_it_has_without_filters() -> None:
    free, filtered = judged(stating(0, SamplingParams()), stating(0, SamplingParams(top_p=0.6)))

    assert (free.is_kept, filtered.is_kept) == (True, False)
    assert filtered.margin == free.margin


def test_a_banned_token_is_infinitely_far() -> None:
    edits = LogitEdits(biases={}, penalties=None, banned_ids=[2], mask=None)

    sampled, greedy = (
        judged(stating(2, SamplingParams(temperature=temperature), edits=edits))[0]
        for temperature in (1.0, 0.0)
    )

    assert sampled == greedy == Judgement(math.inf, -math.inf, 4, is_kept=False)


def test_rows_without_stated_tokens_are_not_judged() -> None:
    greedy = SamplingParams(temperature=0.0)

    found = judged(share([1], [0], sampling=greedy), stating(3, greedy), stating(2, greedy))

    assert [one.rank for one in found] == [2, 1]
