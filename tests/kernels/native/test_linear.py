"""Products with packed matrices against float64, in every format and for any number of rows."""

import ctypes
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels.native.library import Library, pointer
from kernels.native.packed import PACKED_BLOCKS, CodeBits, PackedWeight, Packer, Rows, pack
from kernels.quantized import BLOCK_SIZES, QuantizedWeight, dequantize, quantize
from kernels.scaled_floats import GROUPS
from tests.kernels.blocks import SCALES, random_blocks
from tests.support.models.numerics import assert_close

FORMATS = ["float32", "bfloat16", "float16", *GROUPS, *sorted(PACKED_BLOCKS)]
BLOCKS = [*GROUPS, *sorted(PACKED_BLOCKS)]
"""The formats whose matrices are blocks."""
ROUNDED_CODES = {8: 2.0**-6, 16: 2.0**-14}
"""Inputs of quantized weights are rounded to integers of so many bits."""
ROUNDED_INPUTS = 4e-3
"""Inputs of bfloat16 weights are bfloat16, too."""
WIDTHS = {name: BLOCK_SIZES[name].inputs if name in BLOCKS else 32 for name in FORMATS}
"""Inputs of a block."""
FEWEST = dict.fromkeys(("float32", "bfloat16", "q8_0", "q4_0", "q4_1"), 1)
"""Outputs of the smallest matrix. A single output of random blocks may be a small difference of
large numbers, which has no small relative error."""
SIZES = [
    (name, outputs, num_blocks * WIDTHS[name])
    for name in FORMATS
    for outputs, num_blocks in ((FEWEST.get(name, 17), 1), (37, 2), (160, 3))
]
CODE_BITS: tuple[CodeBits, ...] = get_args(CodeBits)
NUM_ROWS = [1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 25, 100]


def matrix(name: str, outputs: int, inputs: int) -> Rows:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    match name:
        case "q8_0" | "q4_0" | "q4_1":
            return Rows.of_blocks(quantize(weight, name))
    if name in BLOCKS:
        return Rows.of_blocks(random_blocks(name, outputs, inputs))
    return Rows.of_floats(weight.to(getattr(torch, name)))


def dense(weight: Rows) -> Tensor:
    if weight.format in BLOCKS:
        return dequantize(QuantizedWeight(weight.format, weight.data)).double()
    return weight.data.double()


def linear(
    library: Library,
    hidden: Tensor,
    weight: PackedWeight,
    *,
    num_threads: int = 1,
    code_bits: CodeBits = 16,
) -> Tensor:
    """``hidden @ weight.T + bias``, as a step of the decoder computes it."""
    out = torch.empty(hidden.shape[0], weight.outputs)
    library.functions.warren_linear(
        library.team(num_threads),
        pointer(hidden),
        hidden.shape[0],
        ctypes.byref(weight.view()),
        code_bits,
        pointer(out),
    )
    return out


def unpack_rows(library: Library, weight: PackedWeight, rows: Tensor) -> Tensor:
    """The weights of the outputs ``rows``, as a step of the decoder embeds tokens with them."""
    out = torch.empty(len(rows), weight.inputs)
    library.functions.warren_unpack_rows(
        ctypes.byref(weight.view()), pointer(rows), len(rows), pointer(out)
    )
    return out


def tolerance(name: str, code_bits: CodeBits = 16) -> float:
    of_floats = {"float32": 1e-6, "float16": 1e-6, "nf4": 1e-6, "fp4": 1e-6}
    of_floats |= dict.fromkeys(("bfloat16", "float8"), ROUNDED_INPUTS)
    return of_floats.get(name, ROUNDED_CODES[code_bits])


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(100, inputs, generator=torch.Generator().manual_seed(1))[:count].contiguous()


def test_matrices_packed_together_are_those_packed_alone(native: Library) -> None:
    stored = [matrix(name, outputs, inputs) for name, outputs, inputs in SIZES]
    packer = Packer(native, num_threads=2)

    together = [packer.pack([one]) for one in stored]
    packer.finish()

    for one, packed in zip(stored, together, strict=True):
        assert torch.equal(packed.panels, pack(native, [one]).panels)


def test_what_is_mapped_waits_and_many_copies_do_not(native: Library) -> None:
    mapped = torch.ones(1 << 10, 2)[:512]
    copied = torch.ones((64 << 10) + 1, 256)
    packer = Packer(native)

    panels = packer.pack([Rows.of_floats(mapped)]).panels
    assert not panels.any()
    packer.pack([Rows.of_floats(copied)])

    assert panels.view(torch.float32).eq(1).all()


@pytest.mark.parametrize(("name", "outputs", "inputs"), SIZES)
def test_agrees_with_float64(native: Library, name: str, outputs: int, inputs: int) -> None:
    weight, bias = matrix(name, outputs, inputs), torch.randn(outputs)
    packed = pack(native, [weight], bias)
    for num_rows in NUM_ROWS:
        hidden = rows(num_rows, inputs)
        expected = hidden.double() @ dense(weight).T + bias.double()
        for code_bits in CODE_BITS:
            actual = linear(native, hidden, packed, num_threads=2, code_bits=code_bits)
            assert_close(actual, expected, tolerance(name, code_bits))


@pytest.mark.parametrize("name", sorted(PACKED_BLOCKS))
def test_integers_of_8_bits_are_the_nearest_to_their_blocks_scale(
    native: Library, name: str
) -> None:
    weight, hidden = matrix(name, 37, 2 * WIDTHS[name]), rows(9, 2 * WIDTHS[name])

    actual = linear(native, hidden, pack(native, [weight]), code_bits=8)

    blocks = hidden.view(len(hidden), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = ((blocks / scale).round() * scale).flatten(1)
    assert_close(actual, rounded.double() @ dense(weight).T, 1e-5)


@pytest.mark.parametrize("name", sorted(PACKED_BLOCKS))
@pytest.mark.parametrize("code_bits", CODE_BITS)
def test_the_greatest_codes_and_inputs_overflow_no_sum(
    native: Library, name: str, code_bits: CodeBits
) -> None:
    """The weights have the codes of the greatest magnitude, the inputs the greatest integers."""
    weight = matrix(name, 16, WIDTHS[name])
    codes = torch.full_like(weight.data, 128 if name == "q8_0" else 255)
    for at in SCALES.get(name, (0,)):
        codes[..., at : at + 2] = weight.data[..., at : at + 2]
    weight = replace(weight, data=codes)
    hidden = torch.ones(9, WIDTHS[name]) * torch.tensor([[1.0], [-1.0], [0.5]]).repeat(3, 1)

    actual = linear(native, hidden, pack(native, [weight]), code_bits=code_bits)

    assert_close(actual, hidden.double() @ dense(weight).T, 1e-5)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_inputs_need_no_whole_blocks(native: Library, name: str) -> None:
    weight = matrix(name, 17, 34)
    hidden = rows(9, 34)
    actual = linear(native, hidden, pack(native, [weight]))
    assert_close(actual, hidden.double() @ dense(weight).T, tolerance(name))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_the_others_to_the_last_bit(native: Library, name: str) -> None:
    packed = pack(native, [matrix(name, 160, 3 * WIDTHS[name])])
    for code_bits in CODE_BITS:
        alone = linear(native, rows(1, packed.inputs), packed, code_bits=code_bits)
        for num_rows in NUM_ROWS:
            hidden = rows(num_rows, packed.inputs)
            together = linear(native, hidden, packed, num_threads=2, code_bits=code_bits)
            assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_rows_are_the_weights_exactly(native: Library, name: str) -> None:
    weight = matrix(name, 37, 2 * WIDTHS[name])
    index = torch.tensor([0, 36, 15, 16])
    rows = unpack_rows(native, pack(native, [weight]), index)
    assert torch.equal(rows.double(), dense(weight)[index])


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_in_the_wrong_place_is_caught(native: Library, name: str) -> None:
    weight = matrix(name, 37, 2 * WIDTHS[name])
    packed = pack(native, [weight])
    fault = PackedWeight(packed.panels.roll(64), None, packed.format, 37, packed.inputs)
    hidden = rows(3, packed.inputs)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(
            linear(native, hidden, fault), hidden.double() @ dense(weight).T, ROUNDED_INPUTS
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_panels_take_the_bytes_of_the_file_but_for_4_percent(native: Library, name: str) -> None:
    stored = random_blocks(name, 32, 512)
    taken = pack(native, [Rows.of_blocks(stored)]).num_bytes
    assert stored.blocks.nbytes <= taken <= 1.04 * stored.blocks.nbytes


def test_odd_inputs_and_other_types_are_refused(native: Library) -> None:
    with pytest.raises(ValueError, match="33 inputs"):
        pack(native, [Rows.of_floats(torch.zeros(4, 33))])
    with pytest.raises(ValueError, match="float64 cannot be packed"):
        pack(native, [Rows.of_floats(torch.zeros(4, 32, dtype=torch.float64))])


def test_outputs_of_several_formats_are_one_product(native: Library) -> None:
    names = ("q4_k", "q6_k", "q8_0")
    parts = [matrix(name, 32, 512) for name in names]
    bias, hidden = torch.randn(96), rows(7, 512)

    packed = pack(native, parts, bias)

    alone = [linear(native, hidden, pack(native, [part])) for part in parts]
    assert torch.equal(linear(native, hidden, packed, num_threads=2), torch.cat(alone, 1) + bias)
    index = torch.tensor([0, 31, 32, 95])
    expected = torch.cat([dense(part) for part in parts])[index]
    assert torch.equal(unpack_rows(native, packed, index).double(), expected)


def test_weights_of_8_bits_are_multiplied_exactly(native: Library) -> None:
    """Only inputs are rounded."""
    weight, hidden = matrix("float8", 37, 512), rows(9, 512)
    actual = linear(native, hidden, pack(native, [weight]))
    assert_close(actual, hidden.bfloat16().double() @ dense(weight).T, 1e-6)


@pytest.mark.parametrize("name", sorted(PACKED_BLOCKS))
@pytest.mark.parametrize("code_bits", CODE_BITS)
def test_columns_may_be_in_any_order(native: Library, name: str, code_bits: CodeBits) -> None:
    weight, hidden = matrix(name, 37, 2 * WIDTHS[name]), rows(9, 2 * WIDTHS[name])
    order = torch.randperm(weight.inputs, generator=torch.Generator().manual_seed(0)).int()

    ordered = pack(native, [replace(weight, order=order)])

    expected = linear(native, hidden[:, order], pack(native, [weight]), code_bits=code_bits)
    assert torch.equal(linear(native, hidden, ordered, code_bits=code_bits), expected)
    index = torch.tensor([0, 36])
    columns = unpack_rows(native, ordered, index)[:, order]
    assert torch.equal(columns.double(), dense(weight)[index])


def test_outputs_with_columns_in_other_orders_are_not_stacked(native: Library) -> None:
    weight = matrix("q4_0", 32, 64)
    order = torch.arange(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="outputs of q4_0, q4_0 in one matrix"):
        pack(native, [replace(weight, order=order), replace(weight, order=order.flip(0))])


def test_outputs_that_do_not_fill_panels_are_not_stacked(native: Library) -> None:
    with pytest.raises(ValueError, match="outputs of q4_k, q6_k in one matrix"):
        pack(native, [matrix("q4_k", 24, 256), matrix("q6_k", 24, 256)])
