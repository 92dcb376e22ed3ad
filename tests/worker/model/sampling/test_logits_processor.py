"""Edited draws, against a reference that visits the tokens in sequence."""

import math
import random
from array import array
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.providers import load_ops
from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from worker.engine.interface import LogitEdits, ScheduledSequence, TokenPenalties
from worker.model.inputs import build_inputs
from worker.model.sampling.sampler import sample, uniform

OPS = load_ops()
CPU = torch.device("cpu")
VOCAB_SIZE = 101
NUM_WORDS = -(-VOCAB_SIZE // 32)


@dataclass
class Row:
    """The sampling parameters of a row."""

    sampling: SamplingParams
    seed: int
    seen: dict[int, int] = field(default_factory=dict)
    """Tokens of the prompt (count 0) or of the output."""
    banned_ids: list[int] = field(default_factory=list)
    open_ids: set[int] | None = None

    def share(self) -> ScheduledSequence:
        s = self.sampling
        subtracted = [
            s.presence_penalty + s.frequency_penalty * count if count else 0.0
            for count in self.seen.values()
        ]
        penalties = TokenPenalties(
            array("q", self.seen), array("f", subtracted), s.repetition_penalty
        )
        mask = None
        if self.open_ids is not None:
            bits = sum(1 << token_id for token_id in self.open_ids)
            mask = bits.to_bytes(4 * NUM_WORDS, "little")
        edits = LogitEdits(s.logit_bias, penalties if self.seen else None, self.banned_ids, mask)
        return share([1], [0], sampling=s, seed=self.seed, position=3, edits=edits)


def random_row(rng: random.Random) -> Row:
    tokens = range(VOCAB_SIZE)
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.7]),
        top_k=rng.choice([0, 0, 7]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.4, 0.7]),
        presence_penalty=rng.choice([0.0, 1.25]),
        frequency_penalty=rng.choice([0.0, -0.5]),
        logit_bias={t: rng.uniform(-9, 9) for t in rng.sample(tokens, rng.randint(0, 5))},
    )
    return Row(
        sampling,
        rng.randint(0, 1 << 60),
        {t: rng.randint(0, 3) for t in rng.sample(tokens, rng.randint(0, 30))},
        rng.sample(tokens, rng.randint(0, 4)),
        set(rng.sample(tokens, 40)) if rng.random() < 0.5 else None,
    )


def naive_draw(logits: list[float], row: Row) -> tuple[int, float]:
    """The token, and the margin to the next token."""
    s = row.sampling
    edited = {}
    for token_id, logit in enumerate(logits):
        value = logit + s.logit_bias.get(token_id, 0.0)
        if token_id in row.seen:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
            count = row.seen[token_id]
            value -= s.frequency_penalty * count + s.presence_penalty * (count > 0)
        is_open = row.open_ids is None or token_id in row.open_ids
        if is_open and token_id not in row.banned_ids:
            edited[token_id] = value
    order = sorted(edited, key=lambda token_id: -edited[token_id])
    if s.temperature == 0:
        return order[0], edited[order[0]] - edited[order[1]]
    most = edited[order[0]]
    weights = {t: math.exp((edited[t] - most) / s.temperature) for t in order}
    kept = nucleus(order[: s.top_k or None], weights, s.top_p)
    kept = [t for t in kept if weights[t] >= s.min_p]
    target = uniform(row.seed, 0, 3) * sum(weights[t] for t in kept)
    total = 0.0
    for token_id in sorted(kept):
        if target < total + weights[token_id]:
            return token_id, min(target - total, total + weights[token_id] - target)
        total += weights[token_id]
    return max(kept), 0.0


def nucleus(order: list[int], weights: dict[int, float], top_p: float) -> list[int]:
    total = sum(weights[t] for t in order)
    mass, kept = 0.0, []
    for token_id in order:
        if top_p < 1 and mass >= top_p * total:
            break
        kept.append(token_id)
        mass += weights[token_id]
    return kept


def draw(rows: list[Row], logits: Tensor) -> list[int]:
    inputs = build_inputs(batch(*(row.share() for row in rows)), 4, CPU)
    return sample(OPS, logits.clone(), inputs.sampling, inputs.edits).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_draws_are_those_of_the_naive_reference(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = [random_row(rng) for _ in range(64)]
    logits = torch.randn(len(rows), VOCAB_SIZE) * 3

    drawn = draw(rows, logits)

    expected = [naive_draw(logits[k].tolist(), row) for k, row in enumerate(rows)]
    clear = [k for k, (_, margin) in enumerate(expected) if margin > 1e-4]
    assert len(clear) > 50
    assert [drawn[k] for k in clear] == [expected[k][0] for k in clear]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    rng = random.Random(99)
    torch.manual_seed(99)
    rows = [random_row(rng) for _ in range(40)]
    logits = torch.randn(len(rows), VOCAB_SIZE) * 3

    alone = [draw([row], logits[k : k + 1])[0] for k, row in enumerate(rows)]

    assert draw(rows, logits) == alone


def test_rows_without_edits_pay_nothing() -> None:
    plain = share([1], [0], sampling=SamplingParams(temperature=0.0))
    inputs = build_inputs(batch(plain), 4, CPU)
    assert (inputs.sampling, inputs.edits, inputs.scores) == (None, None, None)
