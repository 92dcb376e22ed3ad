"""Planes of codes and scales: their values bit for bit, their size, and products with them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.block_planes import PLANE_BLOCKS, block_planes
from kernels.planes import LAYOUTS, Planes, dequantize_planes, joined_planes, packed_planes
from kernels.providers import Ops, load_ops
from kernels.quantized import BLOCKS, QuantizedWeight, dequantize
from tests.kernels.blocks import random_blocks
from tests.support.models.numerics import assert_close

EACH_FORMAT = pytest.mark.parametrize("name", sorted(PLANE_BLOCKS))
OUTPUTS = 37
MAX_RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture
def ops(provided_ops: Ops) -> Ops:
    return provided_ops


def stored(name: str) -> QuantizedWeight:
    """Inputs that do not fill the last step, as far as the format has such."""
    size = BLOCKS[name].inputs
    with torch.device("cpu"):
        weight = random_blocks(name, OUTPUTS, 96 if size == 32 else 3 * size)
    return QuantizedWeight(name, weight.blocks.to(torch.get_default_device()))


def check(ops: Ops, name: str, num_tokens: int) -> None:
    planes = block_planes(stored(name))
    weight = dequantize(stored(name)).double()
    for dtype, tolerance in MAX_RELATIVE_ERROR.items():
        hidden, bias = torch.randn(num_tokens, planes.inputs).to(dtype), torch.randn(OUTPUTS)
        for added in (None, bias.to(dtype)):
            expected = hidden.double() @ weight.t() + (0 if added is None else added.double())
            actual = ops.plane_linear(hidden, planes, added)
            assert actual.dtype == dtype
            assert_close(actual, expected, tolerance)


@EACH_FORMAT
def test_planes_have_the_values_of_ggml(name: str) -> None:
    weight = stored(name)
    assert torch.equal(dequantize_planes(block_planes(weight)), dequantize(weight))


@EACH_FORMAT
def test_planes_take_the_bytes_of_the_file_but_for_4_percent(name: str) -> None:
    planes = block_planes(random_blocks(name, 2, 512))
    taken = planes.num_bytes - (planes.headers.nbytes if name == "nvfp4" else 0)
    assert taken == LAYOUTS[name].bytes_per_weight * 1024
    assert taken <= 1.04 * BLOCKS[name].bytes_per_weight * 1024


@EACH_FORMAT
def test_shapes_are_known_without_data(name: str) -> None:
    weight = stored(name)
    without = block_planes(QuantizedWeight(name, weight.blocks.to("meta")))
    shapes = [tensor.shape for tensor in block_planes(weight).tensors]
    assert [tensor.shape for tensor in without.tensors] == shapes
    assert dequantize_planes(without).shape == weight.shape


def test_outputs_are_selected_and_joined() -> None:
    planes, index = block_planes(stored("q5_k")), torch.tensor([3, 0, 3])
    both = joined_planes([planes.rows(index), planes.rows(slice(5, 6))])
    assert torch.equal(dequantize_planes(both), dequantize_planes(planes)[[3, 0, 3, 5]])


@EACH_FORMAT
def test_the_product_is_that_of_the_dequantized_matrix(ops: Ops, name: str) -> None:
    check(ops, name, 3)


@pytest.mark.parametrize("num_tokens", [1, 33, 257])
@pytest.mark.parametrize("name", ["q6_k", "iq4_nl"])
def test_any_number_of_tokens(ops: Ops, name: str, num_tokens: int) -> None:
    check(ops, name, num_tokens)


def test_scales_may_be_quotients(ops: Ops) -> None:
    torch.manual_seed(5)
    codes = torch.randint(16, (OUTPUTS, 64), dtype=torch.uint8)
    scales = (torch.rand(OUTPUTS, 4, 1) + 0.5).to(torch.float8_e4m3fn)
    divisors = torch.rand(OUTPUTS, 1, 1) + 3
    planes = packed_planes("nvfp4 quotients", codes, scales, divisors)
    hidden = torch.randn(1, 64)

    values = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])[codes.int()]
    weight = values * (scales.float() / divisors).squeeze(2).repeat_interleave(16, 1)

    assert torch.equal(dequantize_planes(planes), weight)
    expected = hidden.double() @ weight.double().t()
    assert_close(ops.plane_linear(hidden, planes), expected, MAX_RELATIVE_ERROR[torch.float32])


def test_the_result_may_have_more_bits_than_the_inputs(ops: Ops) -> None:
    planes = block_planes(stored("q4_k"))
    for num_tokens in (1, 3):
        hidden = torch.randn(num_tokens, planes.inputs).half()
        actual = ops.plane_linear(hidden, planes, out_dtype=torch.float32)
        expected = hidden.double() @ dequantize_planes(planes).double().t()
        assert actual.dtype == torch.float32
        assert_close(actual, expected, MAX_RELATIVE_ERROR[torch.float16])


def test_a_planted_fault_is_caught(ops: Ops) -> None:
    def faulty(hidden: Tensor, planes: Planes, *rest: Any, **how: Any) -> Tensor:
        low = planes.low.clone()
        low[0, 0, 0] ^= 8
        wrong = Planes(planes.format, planes.inputs, low, *planes.tensors[1:])
        return ops.plane_linear(hidden, wrong, *rest, **how)

    with pytest.raises(AssertionError, match="relative error"):
        check(ops.replace(plane_linear=faulty), "q4_1", 3)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    invariant = load_ops("triton", is_batch_invariant=True)
    planes = block_planes(stored("q4_k"))
    hidden = torch.randn(67, planes.inputs)

    together = invariant.plane_linear(hidden, planes)

    for row in (0, 40, 66):
        alone = invariant.plane_linear(hidden[row : row + 1], planes)
        assert torch.equal(alone[0], together[row])


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    planes = block_planes(stored("q4_0"))
    with pytest.raises(ValueError, match=r"hidden has shape \[2, 95\], expected \[\*, 96\]"):
        ops.plane_linear(torch.randn(2, 95), planes)
    with pytest.raises(ValueError, match=r"bias has shape \[36\], expected \[37\]"):
        ops.plane_linear(torch.randn(2, 96), planes, torch.zeros(36))
    with pytest.raises(ValueError, match=r"headers has shape \[37, 3, 1\], expected \[37, 4, 1\]"):
        Planes("q4_0", 96, *planes.tensors[:3], planes.headers[:, :3])
    with pytest.raises(ValueError, match=r"headers are torch.float32, expected torch.float16"):
        Planes("q4_0", 96, *planes.tensors[:3], planes.headers.float())
