"""Matrices in the library's layout: panels of 16 outputs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from kernels.native.huge_pages import allocate
from kernels.native.library import Library, WeightView, pointer
from kernels.quantized import BLOCKS, QuantizedWeight

_PANEL = 16
FORMATS = {
    name: number
    for number, name in enumerate(
        [
            *("float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
            *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"),
        ]
    )
}
"""`Format` of src/layouts.hpp."""
CodeBits = Literal[8, 16]
"""The bits of the integers that activations become for products with quantized weights."""
PACKED_BLOCKS = FORMATS.keys() & BLOCKS.keys()
"""The formats of ggml whose blocks the library multiplies."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [outputs, inputs] whose outputs are adjacent in memory."""

    format: str
    """The format of the library, such as bfloat16 or q8_0."""
    data: Tensor
    """[outputs, ...]: what an output has, in any type."""
    inputs: int

    @classmethod
    def of_floats(cls, matrix: Tensor) -> Self:
        return cls(str(matrix.dtype).removeprefix("torch."), matrix, matrix.shape[1])

    @classmethod
    def of_blocks(cls, matrix: QuantizedWeight) -> Self:
        return cls(matrix.format, matrix.blocks, matrix.shape[1])


def can_be_stacked(parts: Sequence[Rows]) -> bool:
    """Whether a product can have these outputs: all of the same format, or blocks of any formats
    that fill panels."""
    is_one = len({rows.format for rows in parts}) == 1
    return is_one or all(
        rows.format in PACKED_BLOCKS and len(rows.data) % _PANEL == 0 for rows in parts
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] and the bias [outputs] float32 of its product, if any."""

    panels: Tensor
    """uint8; see src/layouts.hpp."""
    bias: Tensor | None
    format: str
    outputs: int
    """Including the outputs of ``following``."""
    inputs: int
    following: "PackedWeight | None" = None
    """The outputs after these, in another format."""

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (self.following.num_bytes if self.following else 0)

    def view(self) -> WeightView:
        """The structure for the library; valid during the lifetime of this object and itself."""
        following = self.following
        num_outputs = self.outputs - (following.outputs if following else 0)
        return WeightView(
            pointer(self.panels),
            pointer(self.bias),
            FORMATS[self.format],
            self.outputs,
            self.inputs,
            -(-num_outputs // _PANEL),
            ctypes.pointer(following.view()) if following else None,
        )


def pack(
    library: Library, parts: Sequence[Rows], bias: Tensor | None = None, *, num_threads: int = 1
) -> PackedWeight:
    """Pack a matrix whose outputs are the parts', in their order.

    Raises `ValueError` if the number of inputs is odd, for another type, and for parts that cannot
    be stacked.
    """
    if not can_be_stacked(parts):
        raise ValueError(f"outputs of {', '.join(rows.format for rows in parts)} in one matrix")
    runs = [list(parts)] if len({rows.format for rows in parts}) == 1 else [[p] for p in parts]
    packed = None
    for run in reversed(runs):
        outputs = sum(len(rows.data) for rows in run)
        panels = _panels(library, run, outputs, num_threads)
        outputs += packed.outputs if packed else 0
        packed = PackedWeight(panels, None, run[0].format, outputs, run[0].inputs, packed)
    assert packed is not None
    return replace(packed, bias=None if bias is None else bias.float().contiguous())


def _panels(library: Library, run: list[Rows], outputs: int, num_threads: int) -> Tensor:
    """The panels of parts in the same format, packed separately where each fills whole panels, so
    that none is in memory twice."""
    name, inputs = run[0].format, run[0].inputs
    if name not in FORMATS:
        raise ValueError(f"weights of {name} cannot be packed, only of {', '.join(FORMATS)}")
    if inputs % 2:
        raise ValueError(f"{inputs} inputs; their number must be even")
    if any(len(rows.data) % _PANEL for rows in run[:-1]):
        run = [replace(run[0], data=torch.cat([rows.data for rows in run]))]
    call, number = library.functions, FORMATS[name]
    panel_bytes = call.warren_panel_bytes(number, inputs)
    panels = allocate(-(-outputs // _PANEL) * panel_bytes)
    first = 0
    for rows in run:
        data = rows.data.contiguous()
        call.warren_pack(
            library.team(num_threads),
            number,
            pointer(data),
            data.nbytes // max(1, len(data)),
            len(data),
            inputs,
            pointer(panels[first // _PANEL * panel_bytes :]),
        )
        first += len(data)
    return panels
