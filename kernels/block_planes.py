"""The planes of matrices in ggml's blocks (ggml-quants.c, dequantize_row_*)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.planes import LAYOUTS, Planes, joined_planes, packed_planes
from kernels.quantized import BLOCKS, QuantizedWeight

PLANE_BLOCKS = tuple(name for name in LAYOUTS if name in BLOCKS)
"""The formats of ggml that have a layout of planes."""
_CHUNK = 1 << 26
"""Weights converted at a time, so that intermediate results take little memory."""


class _Parts(NamedTuple):
    """What blocks consist of, [rows, blocks, ...]."""

    codes: Tensor
    """[.., inputs of a block] uint8."""
    scales: Tensor | None
    """[.., groups of a block, bytes of a scale] of 8 bits."""
    headers: Tensor | None
    """[.., numbers of a header]."""


def block_planes(weight: QuantizedWeight) -> Planes:
    """The same matrix. ``weight.format`` is one of `PLANE_BLOCKS`."""
    num_rows = max(1, _CHUNK // max(1, weight.shape[1]))
    parts = [_planes(weight.format, blocks) for blocks in torch.split(weight.blocks, num_rows)]
    return parts[0] if len(parts) == 1 else joined_planes(parts)


def _planes(block_format: str, blocks: Tensor) -> Planes:
    codes, scales, headers = _READ[block_format](blocks)
    if not LAYOUTS[block_format].header_groups and headers is not None:
        headers = headers[:, :1]
    return packed_planes(
        block_format,
        codes.flatten(1),
        None if scales is None else scales.flatten(1, 2),
        headers,
    )


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 2:], 16), None, _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 4:], 16), None, _with_addend(blocks))


def _q5_0(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4
    return _Parts(codes, None, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return _Parts(codes, None, _with_addend(blocks))


def _q2_k(blocks: Tensor) -> _Parts:
    return _Parts(
        _pairs_of_bits(blocks[..., 16:80]), blocks[..., :16, None], _halves(blocks, 80, 82)
    )


def _q3_k(blocks: Tensor) -> _Parts:
    codes = _pairs_of_bits(blocks[..., 32:96]) | _bits_apart(blocks[..., :32]) << 2
    packed = blocks[..., 96:108]
    low, high = packed[..., :8], packed[..., 8:]
    lows = torch.cat((low & 15, low >> 4), dim=-1)
    highs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return _Parts(codes, _centred(lows | highs << 4), _halves(blocks, 108))


def _q4_k(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 16:], 32), _six_bits(blocks), _halves(blocks, 0, 2))


def _q5_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 48:], 32) | _bits_apart(blocks[..., 16:48]) << 4
    return _Parts(codes, _six_bits(blocks), _halves(blocks, 0, 2))


def _q6_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., :128], 64) | _pairs_of_bits(blocks[..., 128:192]) << 4
    return _Parts(codes, blocks[..., 192:208, None], _halves(blocks, 208))


def _iq4_xs(blocks: Tensor) -> _Parts:
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    lows = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    highs = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    codes = _nibbles(blocks[..., 8:], 16)
    return _Parts(codes, _centred(lows | highs << 4), _halves(blocks, 0))


def _mxfp4(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 1:], 16), blocks[..., :1, None], None)


def _nvfp4(blocks: Tensor) -> _Parts:
    """ggml ignores the sign of a scale, and takes NaN for 0. Scales are halved, because the values
    are doubled."""
    scales = blocks[..., :4] & 127
    scales = scales.masked_fill(scales == 127, 0)
    headers = torch.full((*blocks.shape[:2], 1), 0.5, device=blocks.device)
    return _Parts(_nibbles(blocks[..., 4:], 8), scales.unsqueeze(-1), headers)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """``width`` inputs in the low halves of as many bytes, then as many in the high halves."""
    runs = packed.reshape(*packed.shape[:-1], -1, width)
    return torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2)


def _bits(packed: Tensor) -> Tensor:
    """The bits of each byte, from the lowest."""
    return torch.stack([packed >> bit & 1 for bit in range(8)], dim=-1).flatten(-2)


def _bits_apart(packed: Tensor) -> Tensor:
    """The lowest bits of all bytes, then the next bits."""
    return torch.cat([packed >> bit & 1 for bit in range(8)], dim=-1)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """The lowest two bits of 32 bytes, then the next two."""
    runs = packed.reshape(*packed.shape[:-1], -1, 32)
    return torch.cat([runs >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)


def _six_bits(blocks: Tensor) -> Tensor:
    """8 scales and minima of 6 bits: [.., 8, 2]."""
    first, second, rest = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=-1)
    return torch.stack((scales, minima), dim=-1)


def _centred(scales: Tensor) -> Tensor:
    return (scales.to(torch.int8) - 32).unsqueeze(-1)


def _halves(blocks: Tensor, *places: int) -> Tensor:
    """The numbers of float16 at these bytes."""
    stored = torch.cat([blocks[..., at : at + 2] for at in places], dim=-1)
    return stored.view(torch.float16)


def _with_addend(blocks: Tensor) -> Tensor:
    """A scale and what is added, whose negative is subtracted."""
    headers = _halves(blocks, 0, 2)
    return torch.stack((headers[..., 0], -headers[..., 1]), dim=-1)


_READ: Mapping[str, Callable[[Tensor], _Parts]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _q4_0,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
