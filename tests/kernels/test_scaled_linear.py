"""Products with weights of 8 bits that have scales for blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops, load_ops
from tests.support.models.numerics import assert_close

OUTPUTS, INPUTS = 70, 288
BLOCKS = {
    "a matrix": (OUTPUTS, INPUTS),
    "outputs": (1, INPUTS),
    "groups": (1, 32),
    "squares": (32, 128),
}
CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
MAX_RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture
def ops(provided_ops: Ops) -> Ops:
    return provided_ops


def matrix(codes: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the matrix in float64. All codes are among them, but for NaN and infinity,
    and for floats of e5m2 that are beyond 256, whose products are beyond float16."""
    torch.manual_seed(3)
    words = torch.arange(OUTPUTS * INPUTS).mul(37).remainder(256).to(torch.uint8)
    numbers = words.view(codes)
    is_number = numbers.float().isfinite() & (numbers.float().abs() <= 256)
    words = torch.where(is_number, words, torch.zeros_like(words))
    numbers = words.view(codes).view(OUTPUTS, INPUTS)
    scales = torch.rand(-(-OUTPUTS // block[0]), -(-INPUTS // block[1])) * 0.02 + 0.01
    outputs, inputs = torch.arange(OUTPUTS), torch.arange(INPUTS)
    wide = scales[outputs[:, None] // block[0], inputs // block[1]]
    return numbers, scales, numbers.double() * wide.double()


def check(ops: Ops, codes: torch.dtype, block: tuple[int, int], num_tokens: int) -> None:
    stored, scales, weight = matrix(codes, block)
    for dtype, tolerance in MAX_RELATIVE_ERROR.items():
        hidden, bias = torch.randn(num_tokens, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
        for added in (None, bias):
            expected = hidden.double() @ weight.t() + (0 if added is None else added.double())
            actual = ops.scaled_linear(hidden, stored, scales, added, block=block)
            assert actual.dtype == dtype
            assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_agrees_with_float64(ops: Ops, codes: torch.dtype, block: str) -> None:
    check(ops, codes, BLOCKS[block], 3)


@pytest.mark.parametrize("num_tokens", [1, 33, 257])
def test_any_number_of_tokens(ops: Ops, num_tokens: int) -> None:
    check(ops, torch.float8_e4m3fn, BLOCKS["squares"], num_tokens)


def test_a_planted_fault_is_caught(ops: Ops) -> None:
    def faulty(hidden: Tensor, codes: Tensor, scales: Tensor, *rest: Any, **how: Any) -> Tensor:
        return ops.scaled_linear(hidden, codes, scales.roll(1, 1), *rest, **how)

    with pytest.raises(AssertionError, match="relative error"):
        check(ops.replace(scaled_linear=faulty), torch.int8, BLOCKS["squares"], 3)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    invariant = load_ops("triton", is_batch_invariant=True)
    block = BLOCKS["groups"]
    codes, scales, _ = matrix(torch.float8_e4m3fn, block)
    hidden = torch.randn(67, INPUTS)

    together = invariant.scaled_linear(hidden, codes, scales, block=block)

    for row in (0, 40, 66):
        alone = invariant.scaled_linear(hidden[row : row + 1], codes, scales, block=block)
        assert torch.equal(alone[0], together[row])


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    block = BLOCKS["groups"]
    codes, scales, _ = matrix(torch.int8, block)
    hidden = torch.randn(2, INPUTS)
    with pytest.raises(ValueError, match=r"scales has shape \[70, 7\], expected \[70, 9\]"):
        ops.scaled_linear(hidden, codes, scales[:, :7], block=block)
    with pytest.raises(ValueError, match=r"codes of torch.int16, expected 8 bits"):
        ops.scaled_linear(hidden, codes.short(), scales, block=block)
    with pytest.raises(ValueError, match=r"blocks of 48 inputs, expected a multiple of 32"):
        ops.scaled_linear(hidden, codes, scales[:, :6], block=(1, 48))
