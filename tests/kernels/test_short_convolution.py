"""Convolutions of several sequences beside a convolution of each sequence as a whole."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.providers import Ops
from tests.support.models.numerics import assert_close

STEPS = [(5, 1, 2), (1, 9, 1), (1, 1, 1), (7, 3, 1)]
"""The number of tokens of each of three sequences per step."""


def convolved(hidden: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    num_taps, size = taps.shape
    padded = functional.pad(hidden.t(), (num_taps - 1, 0))
    return functional.conv1d(padded, taps.t().unsqueeze(1), bias, groups=size).t()


@pytest.mark.parametrize("num_taps", [2, 3, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_division_into_steps_gives_the_convolution_of_the_whole(
    provided_ops: Ops, num_taps: int, *, has_bias: bool
) -> None:
    torch.manual_seed(num_taps)
    size = 7
    taps = torch.randn(num_taps, size)
    bias = torch.randn(size) if has_bias else None
    sequences = [torch.randn(sum(lens), size) for lens in zip(*STEPS, strict=True)]
    states = torch.zeros(len(sequences), num_taps - 1, size)
    results: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)

    for lens in STEPS:
        parts = [
            tokens[at : at + num] for tokens, at, num in zip(sequences, done, lens, strict=True)
        ]
        query_starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
        mixed, states = provided_ops.short_convolution(
            torch.cat(parts), taps, bias, states, query_starts
        )
        for row, part in enumerate(torch.split(mixed, list(lens))):
            results[row].append(part)
            done[row] += lens[row]

    for tokens, computed, state in zip(sequences, results, states, strict=True):
        assert_close(torch.cat(computed), convolved(tokens, taps, bias), 1e-6)
        assert torch.equal(state, tokens[1 - num_taps :])
