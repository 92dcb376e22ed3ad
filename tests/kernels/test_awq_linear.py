"""Products with AWQ's 4-bit weights against a checkpoint that is unpacked value by value."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.awq_layout import dequantize_awq, repack_awq
from kernels.providers import Ops
from tests.support.models.numerics import assert_close

INPUTS, OUTPUTS = 384, 40
GROUP_SIZES = (32, 128, 384)
MAX_RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def ops(provided_ops: Ops) -> Ops:
    return provided_ops


@dataclass(frozen=True)
class Checkpoint:
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group_size: int

    @cached_property
    def weight(self) -> Tensor:
        """[inputs, outputs] float64, by the definition."""
        weight = torch.empty(INPUTS, OUTPUTS, dtype=torch.float64, device="cpu")
        quantized, zeros = self.qweight.tolist(), self.qzeros.tolist()
        scales = self.scales.tolist()
        for row in range(INPUTS):
            group = row // self.group_size
            for column in range(OUTPUTS):
                word, shift = column // 8, 4 * OUTPUT_OF_NIBBLE.index(column % 8)
                value = (quantized[row][word] >> shift & 15) - (zeros[group][word] >> shift & 15)
                weight[row, column] = value * scales[group][column]
        return weight


@cache
def random_checkpoint(group_size: int) -> Checkpoint:
    torch.manual_seed(10)
    num_groups = INPUTS // group_size
    shape = (INPUTS + num_groups, OUTPUTS // 8)
    words = torch.randint(-(2**31), 2**31, shape, device="cpu").int()
    scales = torch.rand(num_groups, OUTPUTS, device="cpu") * 0.02 + 0.01
    return Checkpoint(words[:INPUTS], words[INPUTS:], scales.half(), group_size)


@pytest.fixture(params=GROUP_SIZES)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return random_checkpoint(request.param)


def test_repacked_weights_are_the_checkpoints_exactly(checkpoint: Checkpoint) -> None:
    repacked = repack_awq(checkpoint.qweight, checkpoint.qzeros, checkpoint.scales)
    assert torch.equal(dequantize_awq(*repacked).double(), checkpoint.weight)


def check(ops: Ops, checkpoint: Checkpoint, num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    hidden, bias = torch.randn(num_tokens, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
    repacked = repack_awq(checkpoint.qweight, checkpoint.qzeros, checkpoint.scales)
    qweight, scales, zeros = (tensor.to(hidden.device) for tensor in repacked)
    weight = checkpoint.weight.to(hidden.device)
    for added in (None, bias):
        expected = hidden.double() @ weight + (0 if added is None else added.double())
        actual = ops.awq_linear(
            hidden, qweight, scales, zeros, added, group_size=checkpoint.group_size
        )
        assert actual.dtype == dtype
        assert_close(actual, expected, MAX_RELATIVE_ERROR[dtype])


@pytest.mark.parametrize(
    "dtype",
    # Triton's interpreter rounds bfloat16 differently.
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 70, 257])
def test_agrees_with_float64(
    ops: Ops, checkpoint: Checkpoint, num_tokens: int, dtype: torch.dtype
) -> None:
    check(ops, checkpoint, num_tokens, dtype)


@pytest.mark.parametrize("num_tokens", [1, 17, 70, 257])
def test_a_planted_fault_is_caught(ops: Ops, num_tokens: int) -> None:
    def faulty(hidden: Tensor, qweight: Tensor, *rest: Any, **options: Any) -> Tensor:
        return ops.awq_linear(hidden, qweight.roll(1, 2), *rest, **options)

    with pytest.raises(AssertionError, match="relative error"):
        check(ops.replace(awq_linear=faulty), random_checkpoint(128), num_tokens, torch.float32)


def test_what_cannot_be_packed_is_refused(ops: Ops) -> None:
    words, scales = torch.zeros(64, 5).int(), torch.ones(1, 40)
    with pytest.raises(ValueError, match="64 inputs are not a multiple of 128"):
        repack_awq(words, words[:1], scales)
    with pytest.raises(ValueError, match="128 inputs cannot be in 3 groups of equal size"):
        repack_awq(torch.zeros(128, 5).int(), words[:3], scales.expand(3, -1))
    packed = repack_awq(torch.zeros(128, 5).int(), words[:1], scales)
    with pytest.raises(
        ValueError, match=r"qweight has shape \[1, 40, 16\], expected \[2, \*, 16\]"
    ):
        ops.awq_linear(torch.ones(1, 256), *packed, group_size=128)
