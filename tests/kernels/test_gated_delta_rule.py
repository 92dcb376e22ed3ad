"""The gated delta rule computes each token from the state before it, wherever a step ends."""

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops
from tests.support.models.numerics import assert_close

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
STEPS = [(4, 1), (1, 7), (2, 1)]
"""The number of tokens of two sequences in each step."""


def recurred(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """The results of one head and its last state, in float64: what the paper writes as a product
    of the state with the matrix 1 - strength * k k^T. ``decay`` is [num_tokens], or with a factor
    for each element of keys [num_tokens, KEY_DIM]."""
    query, key = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (query, key))
    state = torch.zeros(VALUE_DIM, KEY_DIM, dtype=torch.float64)
    results = []
    for q, k, v, fades, part in zip(query, key, value.double(), decay, strength, strict=True):
        erased = torch.eye(KEY_DIM, dtype=torch.float64) - part * torch.outer(k, k)
        state = (fades * state) @ erased + part * torch.outer(v, k)
        results.append(state @ q / KEY_DIM**0.5)
    return torch.stack(results), state.t()


@pytest.mark.parametrize("factors", [(), (KEY_DIM,)], ids=["of a head", "of an element"])
def test_every_division_into_steps_gives_the_recurrence_of_the_whole(
    provided_ops: Ops, factors: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    lens = [sum(step) for step in zip(*STEPS, strict=True)]
    sequences = [
        (
            *(torch.randn(count, KEY_HEADS, KEY_DIM) for _ in range(2)),
            torch.randn(count, HEADS, VALUE_DIM),
            torch.rand(count, HEADS, *factors),
            2 * torch.rand(count, HEADS),  # above 1, a state takes the other sign
        )
        for count in lens
    ]
    states = torch.zeros(len(lens), HEADS, KEY_DIM, VALUE_DIM)
    results: list[list[Tensor]] = [[] for _ in lens]
    done = [0] * len(lens)

    for step in STEPS:
        parts = [
            torch.cat(
                [
                    tokens[at : at + count]
                    for tokens, at, count in zip(
                        (sequence[index] for sequence in sequences), done, step, strict=True
                    )
                ]
            )
            for index in range(5)
        ]
        query_starts = torch.tensor([0, *torch.tensor(step).cumsum(0)], dtype=torch.int32)
        query, key, value, decays, strengths = parts
        mixed, states = provided_ops.gated_delta_rule(
            query, key, value, decays, strengths, states, query_starts
        )
        for row, part in enumerate(torch.split(mixed, list(step))):
            results[row].append(part)
            done[row] += step[row]

    for (query, key, value, decay, strength), computed, state in zip(
        sequences, results, states, strict=True
    ):
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            right, last = recurred(
                query[:, shared], key[:, shared], value[:, head], decay[:, head], strength[:, head]
            )
            assert_close(torch.cat(computed)[:, head], right, 1e-5)
            assert_close(state[head], last, 1e-5)
