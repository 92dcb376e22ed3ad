"""Matrices in the library's layout: panels of 16 outputs."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kernels.native.huge_pages import allocate
from kernels.native.library import Library, WeightView, pointer
from kernels.quantized import QuantizedWeight

_PANEL = 16
_FORMATS = {"float32": 0, "bfloat16": 1, "q8_0": 2, "q4_0": 3, "q4_1": 4}


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [outputs, inputs] whose outputs follow one another in memory."""

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


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] and the bias [outputs] float32 of its product, if any."""

    panels: Tensor
    """uint8; see src/packed.hpp."""
    bias: Tensor | None
    format: str
    outputs: int
    inputs: int

    def view(self) -> WeightView:
        """The structure for the library; valid during the lifetime of this object."""
        return WeightView(
            pointer(self.panels),
            pointer(self.bias),
            _FORMATS[self.format],
            self.outputs,
            self.inputs,
        )


def pack(
    library: Library, rows: Rows, bias: Tensor | None = None, *, num_threads: int = 1
) -> PackedWeight:
    """Pack a matrix.

    Raises `ValueError` if the number of inputs is odd, or for another type.
    """
    if rows.format not in _FORMATS:
        raise ValueError(
            f"weights of {rows.format} cannot be packed, only of {', '.join(_FORMATS)}"
        )
    if rows.inputs % 2:
        raise ValueError(f"{rows.inputs} inputs; their number must be even")
    data, outputs = rows.data.contiguous(), len(rows.data)
    call, number = library.functions, _FORMATS[rows.format]
    num_panels = -(-outputs // _PANEL)
    panels = allocate(num_panels * call.warren_panel_bytes(number, rows.inputs))
    call.warren_pack(
        library.team(num_threads),
        number,
        pointer(data),
        data.nbytes // max(1, outputs),
        outputs,
        rows.inputs,
        pointer(panels),
    )
    wide_bias = None if bias is None else bias.float().contiguous()
    return PackedWeight(panels, wide_bias, rows.format, outputs, rows.inputs)
