"""State spaces of several sequences beside the scans of transformers."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.providers import Ops
from tests.support.models.numerics import assert_close

NUM_HEADS, HEAD_DIM, NUM_GROUPS, STATE_DIM = 6, 5, 2, 7
SIZE = 10
STEPS = [(5, 1, 2), (1, 9, 1), (1, 1, 1), (7, 3, 1)]
"""The number of tokens of each of three sequences per step."""
LENS = [sum(lens) for lens in zip(*STEPS, strict=True)]

Scan: TypeAlias = Callable[[list[Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]
"""From tokens, states and the starts of sequences to results and states."""


def in_steps(sequences: list[list[Tensor]], states: Tensor, scan: Scan) -> list[Tensor]:
    """The results of each sequence, whose tokens are hidden states, steps, writes and reads.
    ``states`` are overwritten."""
    results: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for lens in STEPS:
        parts = [
            [tensor[at : at + num] for tensor in sequence]
            for sequence, at, num in zip(sequences, done, lens, strict=True)
        ]
        tokens = [torch.cat(part) for part in zip(*parts, strict=True)]
        query_starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        computed, after = scan(tokens, states, query_starts)
        states.copy_(after)
        for row, part in enumerate(torch.split(computed, list(lens))):
            results[row].append(part)
            done[row] += lens[row]
    return [torch.cat(parts) for parts in results]


def test_every_division_into_steps_gives_the_scan_of_heads(provided_ops: Ops) -> None:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as theirs

    torch.manual_seed(0)
    rates = -torch.rand(NUM_HEADS) * 2
    sequences = [
        [
            torch.randn(num, NUM_HEADS, HEAD_DIM),
            torch.rand(num, NUM_HEADS),
            *torch.randn(2, num, NUM_GROUPS, STATE_DIM),
        ]
        for num in LENS
    ]
    states = torch.zeros(len(LENS), NUM_HEADS, HEAD_DIM, STATE_DIM)

    def scan(tokens: list[Tensor], before: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        hidden, steps, writes, reads = tokens
        return provided_ops.state_space(hidden, steps, rates, writes, reads, before, starts)

    computed = in_steps(sequences, states, scan)

    for sequence, results, state in zip(sequences, computed, states, strict=True):
        hidden, steps, writes, reads = (tensor.double().unsqueeze(0) for tensor in sequence)
        right, right_state = theirs.mamba2_chunk_scan(
            hidden, steps, rates.double(), writes, reads, chunk_size=4, return_final_states=True
        )
        assert_close(results, right[0], 1e-6)
        assert_close(state, right_state[0], 1e-6)


def test_every_division_into_steps_gives_the_scan_of_channels(provided_ops: Ops) -> None:
    from transformers.models.mamba import modeling_mamba as theirs

    torch.manual_seed(0)
    rates = -torch.rand(SIZE, STATE_DIM) * 2
    sequences = [
        [torch.randn(num, SIZE), torch.rand(num, SIZE), *torch.randn(2, num, STATE_DIM)]
        for num in LENS
    ]
    states = torch.zeros(len(LENS), SIZE, STATE_DIM)

    def scan(tokens: list[Tensor], before: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        hidden, steps, writes, reads = tokens
        return provided_ops.selective_scan(hidden, steps, rates, writes, reads, before, starts)

    computed = in_steps(sequences, states, scan)

    for sequence, results, state in zip(sequences, computed, states, strict=True):
        hidden, steps, writes, reads = (one.double().t().unsqueeze(0) for one in sequence)
        right, right_state = theirs.mamba_selective_scan(
            hidden, steps, rates.double(), writes, reads, return_last_state=True
        )
        assert_close(results, right[0].t(), 1e-6)
        assert_close(state, right_state[0], 1e-6)
