"""Matrices in blocks of inputs that share scales: ggml's blocks, as GGUF files have them, and
groups of scaled floats.

Layout, rounding and arithmetic follow ggml's reference (ggml-quants.c: quantize_row_*_ref,
dequantize_row_*). `dequantize` is the specification for multiplication with packed blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.scaled_floats import GROUPS, group_bytes, read_groups
from kernels.shapes import check_shape

QuantFormat = Literal["q8_0", "q4_0", "q4_1"]

"""The formats that floats can be quantized to."""


class BlockSize(NamedTuple):
    """The size of a block of a format."""

    inputs: int
    num_bytes: int

    @property
    def bytes_per_weight(self) -> float:
        return self.num_bytes / self.inputs


BLOCKS: Mapping[str, BlockSize] = {
    "q4_0": BlockSize(32, 18),
    "q4_1": BlockSize(32, 20),
    "q5_0": BlockSize(32, 22),
    "q5_1": BlockSize(32, 24),
    "q8_0": BlockSize(32, 34),
    "q2_k": BlockSize(256, 84),
    "q3_k": BlockSize(256, 110),
    "q4_k": BlockSize(256, 144),
    "q5_k": BlockSize(256, 176),
    "q6_k": BlockSize(256, 210),
    "iq4_nl": BlockSize(32, 18),
    "iq4_xs": BlockSize(256, 136),
    "mxfp4": BlockSize(32, 17),
    "iq1_s": BlockSize(256, 50),
    "iq1_m": BlockSize(256, 56),
    "iq2_xxs": BlockSize(256, 66),
    "iq2_xs": BlockSize(256, 74),
    "iq2_s": BlockSize(256, 82),
    "iq3_xxs": BlockSize(256, 98),
    "iq3_s": BlockSize(256, 110),
    "tq1_0": BlockSize(256, 54),
    "tq2_0": BlockSize(256, 66),
    "nvfp4": BlockSize(64, 36),
}
"""The formats of ggml, by their names in lower case."""
BLOCK_SIZES: Mapping[str, BlockSize] = {
    **BLOCKS,
    **{name: BlockSize(inputs, group_bytes(name)) for name, inputs in GROUPS.items()},
}
"""The formats of ggml, and of scaled floats."""

_SCALES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
}
"""Where a block has its float16 scale, and its minimum if it has one."""
MAX_EXPONENT = 252
"""The greatest exponent of MXFP4 with which every float of 4 bits is finite in 32 bits."""

INTEGERS: Mapping[str, tuple[int, int]] = {
    "q4_0": (-8, 7),
    "q5_0": (-16, 15),
    "q8_0": (-128, 127),
}
"""The least and the greatest integer that a format multiplies with a block's scale."""

_CHUNK = 1 << 20
"""Elements converted at a time, so that intermediate results stay in the cache."""
_HALF = 0.5 - 2**-25
"""The greatest float below 0.5. Added before truncation, it rounds halves away from zero exactly;
0.5 itself would round its predecessor up to 1."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [outputs, inputs] as uint8 ``blocks`` [outputs, blocks of a row, bytes of a block].

    For example, a block starts with its float16 scale. q8_0: 32 int8. q4_0: 16 bytes, input i in
    the low nibble of byte i and input i + 16 in the high nibble, each offset by 8. q4_1: the same
    without offset, after a float16 minimum.
    """

    format: str
    """A key of `BLOCK_SIZES`."""
    blocks: Tensor

    def __post_init__(self) -> None:
        check_shape("blocks", self.blocks, [None, None, BLOCK_SIZES[self.format].num_bytes])
        if self.blocks.dtype != torch.uint8:
            raise ValueError(f"blocks are {self.blocks.dtype}, expected {torch.uint8}")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK_SIZES[self.format].inputs

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def rows(self, index: Tensor) -> "QuantizedWeight":
        """The outputs selected by ``index``, [any] int64, in its order."""
        return QuantizedWeight(self.format, self.blocks[index])


def quantize(weight: Tensor, quant_format: QuantFormat) -> QuantizedWeight:
    """Quantize a matrix [outputs, inputs] of any float type.

    Raises `ValueError` if the number of inputs is not a multiple of 32, or if a scale is NaN or
    exceeds float16.
    """
    check_shape("weight", weight, [None, None])
    outputs, inputs = weight.shape
    size = BLOCKS[quant_format]
    if inputs % size.inputs:
        raise ValueError(f"weight has {inputs} inputs, expected a multiple of {size.inputs}")
    shape = (outputs, inputs // size.inputs, size.num_bytes)
    blocks = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    pack = _PACK[quant_format]
    for source, target in _chunks(weight, blocks):
        pack(source.float().reshape(*target.shape[:2], size.inputs), target)
    return QuantizedWeight(quant_format, blocks)


def pack_integers(numbers: Tensor, scales: Tensor, block_format: str) -> QuantizedWeight:
    """Integers [outputs, inputs] times scales [outputs, groups of inputs] float16, in blocks of
    equal values. ``block_format`` is a key of `INTEGERS`.

    Raises `ValueError` for integers that the format does not have, and for groups that are not
    whole blocks.
    """
    (outputs, inputs), num_groups = numbers.shape, scales.shape[1]
    size, (low, high) = BLOCKS[block_format], INTEGERS[block_format]
    if num_groups < 1 or inputs % (num_groups * size.inputs):
        raise ValueError(f"{inputs} inputs in {num_groups} groups, which are not whole blocks")
    if numbers.numel() and (numbers.amin() < low or numbers.amax() > high):
        raise ValueError(f"{block_format} has integers from {low} to {high}")
    shape = (outputs, inputs // size.inputs, size.num_bytes)
    blocks = torch.empty(shape, dtype=torch.uint8, device=numbers.device)
    halves = scales.repeat_interleave(shape[1] // num_groups, 1).unsqueeze(-1)
    blocks[..., :2] = halves.view(torch.uint8)
    for source, target in _chunks(numbers, blocks):
        _PACK_INTEGERS[block_format](source.reshape(*target.shape[:2], size.inputs), target)
    return QuantizedWeight(block_format, blocks)


def has_finite_scales(weight: QuantizedWeight) -> bool:
    """Whether no scale or minimum of a block makes its weights infinite or NaN. True without data,
    on the meta device, and for NVFP4, in which ggml takes NaN for 0.

    Only scales are read, in about 0.1 s for 1 GiB of q4_0, so that a file can be checked whenever
    it is loaded.
    """
    if weight.blocks.is_meta:
        return True
    if weight.format == "mxfp4":
        return bool(weight.blocks[..., 0].amax() <= MAX_EXPONENT)
    if weight.format == "iq1_m":
        # The scale's bits, from the lowest, are the highest 4 of each of the last 4 words.
        words = weight.blocks[..., 48:].view(torch.int16).int()
        is_odd = (words[..., 3] & 0x7000 == 0x7000) & (words[..., 2] & 0xC000 == 0xC000)
        return not bool(is_odd.any())
    scales = (weight.blocks[..., at : at + 2] for at in _SCALES.get(weight.format, ()))
    return all(int((each.view(torch.int16) & 0x7FFF).amax()) < 0x7C00 for each in scales)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return [outputs, inputs] float32."""
    num_inputs = BLOCK_SIZES[weight.format].inputs
    values = torch.empty(*weight.blocks.shape[:2], num_inputs, device=weight.device)
    unpack = _UNPACK.get(weight.format) or partial(_unpack_by_library, weight.format)
    for source, target in _chunks(weight.blocks, values):
        unpack(source, target)
    return values.view(weight.shape)


def _chunks(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both tensors into pieces of equal numbers of rows. Tensors on the meta device have no
    data to convert, so there are no pieces."""
    if source.is_meta:
        return iter(())
    outputs = len(source)
    num_rows = max(1, _CHUNK * outputs // max(1, target.numel(), source.numel()))
    return zip(torch.split(source, num_rows), torch.split(target, num_rows), strict=True)


def _pack_q8_0(values: Tensor, blocks: Tensor) -> None:
    scale = values.abs().amax(dim=-1, keepdim=True).div_(127)
    scaled = values * _inverse(scale)
    scaled += torch.copysign(scaled.new_tensor(_HALF), scaled)
    _put_float16(scale, blocks[..., :2])
    blocks[..., 2:] = scaled.to(torch.int8).view(torch.uint8)


def _pack_q4_0(values: Tensor, blocks: Tensor) -> None:
    """The value with the largest magnitude becomes -8, so the scale may be negative."""
    farthest = values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))
    scale = farthest.div_(-8)
    scaled = (values * _inverse(scale)).add_(8.5)
    _put_float16(scale, blocks[..., :2])
    _put_nibbles(scaled, blocks[..., 2:])


def _pack_q4_1(values: Tensor, blocks: Tensor) -> None:
    least, greatest = values.aminmax(dim=-1, keepdim=True)
    scale = (greatest - least).div_(15)
    scaled = (values - least).mul_(_inverse(scale)).add_(0.5)
    _put_float16(scale, blocks[..., :2])
    _put_float16(least, blocks[..., 2:4])
    _put_nibbles(scaled, blocks[..., 4:])


def _inverse(scale: Tensor) -> Tensor:
    """The inverse, or 0 if the scale is too small for it: such a block is zero in float16."""
    inverse = scale.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0)


def _put_float16(values: Tensor, target: Tensor) -> None:
    halves = values.half()
    if not halves.isfinite().all():
        raise ValueError("weight has NaN, or values too large for a float16 scale")
    target.copy_(halves.view(torch.uint8))


def _put_nibbles(scaled: Tensor, target: Tensor) -> None:
    nibbles = scaled.to(torch.uint8).clamp_(max=15)
    low, high = nibbles.chunk(2, dim=-1)
    torch.bitwise_or(low, high << 4, out=target)


def _put_bytes(numbers: Tensor, blocks: Tensor) -> None:
    blocks[..., 2:] = numbers.to(torch.int8).view(torch.uint8)


def _put_halves(numbers: Tensor, blocks: Tensor) -> None:
    _put_nibbles(numbers + 8, blocks[..., 2:])


def _put_halves_and_bits(numbers: Tensor, blocks: Tensor) -> None:
    codes = (numbers + 16).to(torch.uint8)
    bits = (codes >> 4).view(*codes.shape[:-1], 4, 8) << torch.arange(8, device=codes.device)
    blocks[..., 2:6] = bits.sum(dim=-1)
    _put_nibbles(codes & 15, blocks[..., 6:])


def _unpack_q8_0(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks[..., 2:].view(torch.int8)).mul_(_float16(blocks[..., :2]))


def _unpack_q4_0(blocks: Tensor, values: Tensor) -> None:
    _unpack_nibbles(blocks[..., 2:], values)
    values.sub_(8).mul_(_float16(blocks[..., :2]))


def _unpack_q4_1(blocks: Tensor, values: Tensor) -> None:
    _unpack_nibbles(blocks[..., 4:], values)
    values.mul_(_float16(blocks[..., :2])).add_(_float16(blocks[..., 2:4]))


def _unpack_by_library(block_format: str, blocks: Tensor, values: Tensor) -> None:
    from gguf import GGMLQuantizationType
    from gguf import dequantize as dequantized

    kind = GGMLQuantizationType[block_format.upper()]
    rows = blocks.flatten(1).cpu().numpy()
    values.copy_(torch.from_numpy(dequantized(rows, kind)).view(values.shape))


def _unpack_nibbles(packed: Tensor, values: Tensor) -> None:
    low, high = values.chunk(2, dim=-1)
    low.copy_(packed & 15)
    high.copy_(packed >> 4)


def _float16(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


_Convert: TypeAlias = Callable[[Tensor, Tensor], None]
"""Converts the first tensor into the second: [rows, blocks of a row, 32 or the bytes of a
block]."""

_PACK: dict[QuantFormat, _Convert] = {
    "q8_0": _pack_q8_0,
    "q4_0": _pack_q4_0,
    "q4_1": _pack_q4_1,
}
_PACK_INTEGERS: dict[str, _Convert] = {
    "q4_0": _put_halves,
    "q5_0": _put_halves_and_bits,
    "q8_0": _put_bytes,
}
_UNPACK: dict[str, _Convert] = {
    "q8_0": _unpack_q8_0,
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    **{name: partial(read_groups, name) for name in GROUPS},
}
