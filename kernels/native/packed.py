"""Matrices in the library's layout: panels of 16 outputs."""

from dataclasses import dataclass

from torch import Tensor

from kernels.native.huge_pages import allocate
from kernels.native.library import Library, WeightView, pointer
from kernels.quantized import BLOCK_BYTES, BLOCK_INPUTS, Matrix, QuantizedWeight

_PANEL = 16
_FORMATS = {"float32": 0, "bfloat16": 1, "q8_0": 2, "q4_0": 3, "q4_1": 4}


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
    library: Library, weight: Matrix, bias: Tensor | None = None, *, num_threads: int = 1
) -> PackedWeight:
    """Pack a matrix of float32, bfloat16 or quantized blocks.

    Raises `ValueError` if the number of inputs is odd, or for another type.
    """
    name = weight.format if isinstance(weight, QuantizedWeight) else str(weight.dtype)[6:]
    if name not in _FORMATS:
        raise ValueError(f"weights of {name} cannot be packed, only of {', '.join(_FORMATS)}")
    outputs, inputs = weight.shape
    if inputs % 2:
        raise ValueError(f"{inputs} inputs; their number must be even")
    rows = weight.blocks if isinstance(weight, QuantizedWeight) else weight
    rows = rows.contiguous()
    call = library.functions
    num_panels = -(-outputs // _PANEL)
    panels = allocate(num_panels * call.warren_panel_bytes(_FORMATS[name], inputs))
    call.warren_pack(
        library.team(num_threads),
        _FORMATS[name],
        pointer(rows),
        _row_bytes(weight, inputs),
        outputs,
        inputs,
        pointer(panels),
    )
    wide_bias = None if bias is None else bias.float().contiguous()
    return PackedWeight(panels, wide_bias, name, outputs, inputs)


def _row_bytes(weight: Matrix, inputs: int) -> int:
    if isinstance(weight, QuantizedWeight):
        return inputs // BLOCK_INPUTS * BLOCK_BYTES[weight.format]
    return inputs * weight.element_size()
