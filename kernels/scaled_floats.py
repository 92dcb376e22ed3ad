"""Floats of 8 and 4 bits, of which a group of neighbouring inputs shares a scale.

A group is a float32 scale, then codes: bytes of E4M3 (Micikevicius et al., arXiv:2209.05433), or
pairs of 4-bit floats of bitsandbytes (Dettmers et al., arXiv:2305.14314), the first one in the high
half.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

GROUPS: Mapping[str, int] = {"float8": 128, "nf4": 64, "fp4": 64}
"""The inputs of a group in each format."""
_SCALE_BYTES = 4
VALUES: Mapping[str, Tensor] = {
    "nf4": torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
            *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ]
    ),
    "fp4": torch.tensor(
        [0.0, 0.0625, 8, 12, 4, 6, 2, 3, 0.0, -0.0625, -8, -12, -4, -6, -2, -3]
    ).div(12),
}
"""The values of codes of 4 bits (bitsandbytes/functional.py, get_4bit_type)."""
_LEAST, _GREATEST = 2.0**-126, 2.0**119
"""The magnitudes of scales with which products are computed as with any float: smaller numbers
become zero, and greater ones overflow when they are multiplied by a power of two."""


def group_bytes(name: str) -> int:
    return _SCALE_BYTES + (GROUPS[name] if name == "float8" else GROUPS[name] // 2)


def scaled_groups(name: str, codes: Tensor, scales: Tensor) -> Tensor | None:
    """The groups [outputs, groups, bytes of a group] of bytes [outputs, bytes] and of scales
    [outputs, groups]; None for scales or codes that the products do not have, such as NaN."""
    outputs, num_groups = scales.shape
    scales, stored = scales.float().unsqueeze(-1), codes.view(outputs, num_groups, -1)
    sizes = scales.abs()
    are_usual = ((sizes == 0) | (sizes >= _LEAST)) & (sizes <= _GREATEST)
    if not are_usual.all() or (name == "float8" and bool(((stored & 127) == 127).any())):
        return None
    groups = codes.new_empty(outputs, num_groups, group_bytes(name))
    groups[..., :_SCALE_BYTES] = scales.contiguous().view(torch.uint8)
    groups[..., _SCALE_BYTES:] = stored
    return groups


def read_groups(name: str, groups: Tensor, values: Tensor) -> None:
    """Write the weights [outputs, groups, inputs of a group] of the groups."""
    scales = groups[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    codes = groups[..., _SCALE_BYTES:].contiguous()
    if name == "float8":
        values.copy_(codes.view(torch.float8_e4m3fn))
    else:
        pairs = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        values.copy_(VALUES[name].to(codes.device)[pairs.int()])
    values.mul_(scales)
