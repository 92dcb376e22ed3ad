"""Packed matrices against the `gguf` package's own arithmetic, bit for bit."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as ggml
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.quantized import (
    BLOCKS,
    INTEGERS,
    QuantFormat,
    QuantizedWeight,
    dequantize,
    pack_integers,
    quantize,
)
from tests.kernels.blocks import random_blocks
from tests.support.models.numerics import poisoned

FORMATS: tuple[QuantFormat, ...] = get_args(QuantFormat)
EACH_FORMAT = pytest.mark.parametrize("quant_format", FORMATS)
MAX_STEPS = {"q8_0": 0.57, "q4_0": 1.01, "q4_1": 0.52}
"""How far a value may move, in scales, which float16 rounds. In q4_0, +8 is stored as 7."""


def random(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def check_same_as_ggml(weight: Tensor, quant_format: QuantFormat) -> None:
    """Packed and unpacked, for any type of ``weight``."""
    kind = GGMLQuantizationType[quant_format.upper()]
    expected = ggml.quantize(weight.float().numpy(), kind)
    packed = quantize(weight, quant_format)
    assert packed.shape == tuple(weight.shape)
    assert np.array_equal(packed.blocks.numpy().reshape(expected.shape), expected)
    assert np.array_equal(dequantize(packed).numpy(), ggml.dequantize(expected, kind))


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "one block": lambda: random(1, 32),
    "odd number of rows": lambda: random(7, 96),
    "longer than a chunk": lambda: random(3, 32 * 9001),
    "bfloat16": lambda: random(5, 64).bfloat16(),
    "float16": lambda: random(5, 64).half(),
    "not contiguous": lambda: random(64, 6).t(),
    "zeros": lambda: torch.zeros(2, 64),
    "negative zeros": lambda: -torch.zeros(2, 64),
    "a constant": lambda: torch.full((2, 64), -0.37),
    "only positive": lambda: random(3, 64).abs() + 1,
    "halves that round": lambda: torch.arange(-127, 129).reshape(1, 256) / 2,
    "equally far from zero": lambda: random(9, 64).sign() * 0.75,
    "one outlier": lambda: random(2, 64).index_fill(1, torch.tensor([5, 40]), 4e4),
    "float16's greatest scale": lambda: random(2, 64).clamp(-1, 1) * 65504,
    "below float16": lambda: random(2, 64) * 1e-9,
}


@pytest.mark.parametrize("block_format", BLOCKS)
def test_every_format_of_ggml_is_dequantized_as_by_ggml(block_format: str) -> None:
    kind = GGMLQuantizationType[block_format.upper()]
    packed = random_blocks(block_format, 5, 512)

    expected = ggml.dequantize(packed.blocks.flatten(1).numpy(), kind)

    assert GGML_QUANT_SIZES[kind] == tuple(BLOCKS[block_format])
    assert packed.shape == (5, 512)
    assert np.array_equal(dequantize(packed).numpy(), expected, equal_nan=True)


@EACH_FORMAT
@pytest.mark.parametrize("weight", WEIGHTS)
def test_blocks_are_those_of_ggml(weight: str, quant_format: QuantFormat) -> None:
    check_same_as_ggml(WEIGHTS[weight](), quant_format)


@EACH_FORMAT
@settings(max_examples=50, deadline=None)
@given(
    exponents=st.lists(st.integers(-20, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 0.5, 0.125]),
)
def test_blocks_of_any_magnitude_are_those_of_ggml(
    quant_format: QuantFormat, exponents: list[int], seed: int, step: float
) -> None:
    """Values with a step between them are equal, or on the border between two numbers."""
    weight = random(3, 32 * len(exponents), seed)
    weight = (weight / step).round() * step if step else weight
    check_same_as_ggml(
        weight * (2.0 ** torch.tensor(exponents)).repeat_interleave(32), quant_format
    )


@EACH_FORMAT
def test_a_value_moves_by_a_step_at_most(quant_format: QuantFormat) -> None:
    weight = random(64, 256)
    packed = quantize(weight, quant_format)
    scale = packed.blocks[..., :2].contiguous().view(torch.float16).float().abs()
    moved = (dequantize(packed) - weight).view(64, 8, 32).abs()
    assert (moved / scale).max() < MAX_STEPS[quant_format]


@EACH_FORMAT
def test_values_without_a_scale_in_float32_become_zeros(quant_format: QuantFormat) -> None:
    """The inverse of such a scale is infinite, so ggml's result is undefined."""
    packed = quantize(torch.full((1, 32), 1e-42) * torch.arange(32), quant_format)
    assert torch.equal(dequantize(packed), torch.zeros(1, 32))


@EACH_FORMAT
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_has_no_float16_scale_is_refused(quant_format: QuantFormat, value: float) -> None:
    weight = random(4, 64)
    weight[2, 33] = value
    with pytest.raises(ValueError, match="weight has NaN, or values too large for a float16"):
        quantize(weight, quant_format)


@EACH_FORMAT
def test_a_matrix_without_rows_stays_one(quant_format: QuantFormat) -> None:
    assert dequantize(quantize(torch.empty(0, 64), quant_format)).shape == (0, 64)


def test_rows_are_taken_without_unpacking() -> None:
    packed = quantize(random(6, 64), "q4_1")
    index = torch.tensor([4, 0, 4])
    assert torch.equal(dequantize(packed.rows(index)), dequantize(packed)[index])


def test_shapes_that_do_not_fit_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match="weight has 48 inputs, expected a multiple of 32"):
        quantize(torch.ones(2, 48), "q8_0")
    with pytest.raises(ValueError, match=r"weight has shape \[64\], expected \[\*, \*\]"):
        quantize(torch.ones(64), "q8_0")
    with pytest.raises(ValueError, match=r"blocks has shape \[2, 3, 18\], expected \[\*, \*, 20\]"):
        QuantizedWeight("q4_1", torch.zeros(2, 3, BLOCKS["q4_0"].num_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"blocks are torch\.float32, expected torch\.uint8"):
        QuantizedWeight("q8_0", poisoned(2, 3, BLOCKS["q8_0"].num_bytes))


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_a_wrong_byte_is_caught(offset: int) -> None:
    """The comparison detects a scale, a number or a minimum with a wrong bit."""
    packed = quantize(random(2, 64), "q4_1")
    expected = dequantize(packed)
    packed.blocks[1, 1, offset] ^= 1
    assert not torch.equal(dequantize(packed), expected)


@pytest.mark.parametrize("group", [32, 96, 192])
@pytest.mark.parametrize("block_format", INTEGERS)
def test_integers_with_scales_keep_their_values_in_blocks(block_format: str, group: int) -> None:
    least, greatest = INTEGERS[block_format]
    generator = torch.Generator().manual_seed(group)
    numbers = torch.randint(least, greatest + 1, (5, 192), generator=generator)
    scales = random(5, 192 // group).half()

    packed = pack_integers(numbers, scales, block_format)

    expected = numbers.float() * scales.float().repeat_interleave(group, 1)
    kind = GGMLQuantizationType[block_format.upper()]
    assert torch.equal(dequantize(packed), expected)
    assert np.array_equal(ggml.dequantize(packed.blocks.flatten(1).numpy(), kind), expected)


@pytest.mark.parametrize("block_format", INTEGERS)
def test_integers_that_a_format_lacks_are_refused(block_format: str) -> None:
    for number in (INTEGERS[block_format][0] - 1, INTEGERS[block_format][1] + 1):
        with pytest.raises(ValueError, match=f"{block_format} has integers from"):
            pack_integers(torch.full((1, 32), number), torch.ones(1, 1).half(), block_format)


@pytest.mark.parametrize("num_groups", [0, 3, 4])
def test_groups_of_integers_are_whole_blocks(num_groups: int) -> None:
    scales = torch.ones(1, num_groups).half()
    with pytest.raises(ValueError, match=f"64 inputs in {num_groups} groups"):
        pack_integers(torch.zeros(1, 64).int(), scales, "q4_0")
