"""Projections whose rows do not depend on other rows."""

import pytest
import torch

from kernels.providers import load_ops
from tests.support.models.numerics import assert_close

SHAPES = [(1, 70, 96), (67, 130, 300), (33, 64, 130)]
"""(tokens, outputs, inputs), none of them a multiple of the tile sizes."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
INVARIANT = load_ops("triton", is_batch_invariant=True)
REFERENCE = load_ops("reference")


@pytest.fixture(
    params=[
        torch.float32,
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


def inputs(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, bias."""
    torch.manual_seed(0)
    num_tokens, outputs, width = shape
    sizes = ((num_tokens, width), (outputs, width), (outputs,))
    hidden, weight, bias = (torch.randn(size, device=device).to(dtype) for size in sizes)
    return hidden, weight, bias


@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_tiles_give_the_reference(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight, bias = inputs(shape, device, dtype)
    ours = INVARIANT.projection(hidden, weight, bias)
    theirs = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    assert ours.dtype == dtype
    assert_close(ours, theirs, MAX_RELATIVE_ERROR[dtype])
    assert_close(
        INVARIANT.projection(hidden, weight, None), theirs - bias, 2 * MAX_RELATIVE_ERROR[dtype]
    )


def test_logits_are_not_rounded(device: torch.device) -> None:
    hidden, weight, _ = inputs((5, 70, 96), device, torch.float16)
    exact = hidden.double() @ weight.double().t()
    for ops in (INVARIANT, load_ops("triton")):
        assert ops.logits(hidden, weight).dtype == torch.float32
        assert_close(ops.logits(hidden, weight), exact, 1e-5)


def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    hidden, weight, bias = inputs((67, 130, 300), device, torch.float32)
    together = INVARIANT.projection(hidden, weight, bias)
    for row in (0, 40, 66):
        alone = INVARIANT.projection(hidden[row : row + 1], weight, bias)
        assert torch.equal(alone[0], together[row])


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    hidden, weight, bias = inputs((0, 70, 96), device, torch.float32)
    assert INVARIANT.projection(hidden, weight, bias).shape == (0, 70)


def test_shapes_that_differ_are_refused(device: torch.device) -> None:
    hidden, weight, bias = inputs((3, 70, 96), device, torch.float32)
    for ops in (INVARIANT, REFERENCE):
        with pytest.raises(ValueError, match="weight has shape"):
            ops.projection(hidden[:, 1:], weight, bias)
        with pytest.raises(ValueError, match="bias has shape"):
            ops.projection(hidden, weight, bias[1:])
