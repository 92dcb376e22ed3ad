"""Matrices in the library's layout: panels of 16 outputs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from kernels.native.huge_pages import allocate
from kernels.native.library import Library, UnpackedView, WeightView, pointer
from kernels.quantized import BLOCKS, QuantizedWeight

_PANEL = 16
_MAX_WAITING = 1 << 30
"""Bytes that are packed together. The progress of larger models is reported."""
_MAX_COPIED = 64 << 20
"""Bytes of these that are not mapped from a file, but in memory twice until they are packed."""
FORMATS = {
    name: number
    for number, name in enumerate(
        [
            *("float32", "bfloat16", "float16", "float8", "nf4", "fp4"),
            *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
            *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"),
        ]
    )
}
"""`Format` of src/layouts.hpp."""
CodeBits = Literal[8, 16]
"""The bits of the integers that activations become for products with quantized weights."""
PACKED_BLOCKS = FORMATS.keys() & BLOCKS.keys()
"""The formats of ggml whose blocks the library multiplies, with inputs as integers."""


class OddScale(ValueError):
    """A matrix has a scale that is infinite or NaN, or makes weights infinite."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [outputs, inputs] whose outputs are adjacent in memory."""

    format: str
    """The format of the library, such as bfloat16 or q8_0."""
    data: Tensor
    """[outputs, ...]: what an output has, in any type."""
    inputs: int
    order: Tensor | None = None
    """[inputs] int32: the input that each column is multiplied by; None: in their order."""
    name: str | None = None
    """What errors call it."""

    @classmethod
    def of_floats(cls, matrix: Tensor) -> Self:
        return cls(str(matrix.dtype).removeprefix("torch."), matrix, matrix.shape[1])

    @classmethod
    def of_blocks(
        cls, matrix: QuantizedWeight, order: Tensor | None = None, name: str | None = None
    ) -> Self:
        return cls(matrix.format, matrix.blocks, matrix.shape[1], order, name)


def can_be_stacked(parts: Sequence[Rows]) -> bool:
    """Whether a product can have these outputs: with columns in the same order, and all of the same
    format, or blocks of any formats that fill panels."""
    if not all(_are_equal(rows.order, parts[0].order) for rows in parts):
        return False
    is_one = len({rows.format for rows in parts}) == 1
    return is_one or all(
        rows.format in PACKED_BLOCKS and len(rows.data) % _PANEL == 0 for rows in parts
    )


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


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
    order: Tensor | None = None
    """See `Rows`."""

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
            pointer(self.order),
        )


class Packer:
    """Packs matrices while others are read.

    Most are packed together in one call, in which other threads have the interpreter's lock, and
    all matrices without a pause.
    """

    def __init__(self, library: Library, num_threads: int = 1) -> None:
        self._library = library
        self._num_threads = num_threads
        self._waiting: list[tuple[UnpackedView, Rows, Tensor]] = []
        """Each matrix, its rows, which are contiguous, and the tensor for its panels."""
        self._num_bytes = 0
        self._num_copied = 0

    def pack(self, parts: Sequence[Rows], bias: Tensor | None = None) -> PackedWeight:
        """A matrix whose outputs are the parts', in their order. Its panels may be empty until
        `finish`.

        Raises `OddScale` as `finish` does, and `ValueError` if the number of inputs is odd, for
        another type, and for parts that cannot be stacked.
        """
        if not can_be_stacked(parts):
            raise ValueError(f"outputs of {', '.join(rows.format for rows in parts)} in one matrix")
        is_one = len({rows.format for rows in parts}) == 1
        packed = None
        for run in reversed([list(parts)] if is_one else [[rows] for rows in parts]):
            outputs = sum(len(rows.data) for rows in run)
            panels = self._panels(run, outputs)
            outputs += packed.outputs if packed else 0
            packed = PackedWeight(panels, None, run[0].format, outputs, run[0].inputs, packed)
        assert packed is not None
        vector = None if bias is None else bias.float().contiguous()
        return replace(packed, bias=vector, order=parts[0].order)

    def finish(self) -> None:
        """Fill the panels of all matrices. Raises `OddScale`."""
        waiting, self._waiting = self._waiting, []
        self._num_bytes = self._num_copied = 0
        matrices = (UnpackedView * len(waiting))(*(view for view, *_ in waiting))
        team = self._library.team(self._num_threads)
        first_odd = self._library.functions.warren_pack(team, matrices, len(matrices))
        for _, rows, _ in waiting[first_odd:]:
            name = rows.name or "a matrix"
            raise OddScale(f"{name} cannot be read as {rows.format}: a scale is infinite or NaN")

    def _panels(self, run: list[Rows], outputs: int) -> Tensor:
        """The panels of parts in the same format, packed separately where each fills whole panels,
        so that none is in memory twice."""
        name, inputs = run[0].format, run[0].inputs
        if name not in FORMATS:
            raise ValueError(f"weights of {name} cannot be packed, only of {', '.join(FORMATS)}")
        if inputs % 2:
            raise ValueError(f"{inputs} inputs; their number must be even")
        if any(len(rows.data) % _PANEL for rows in run[:-1]):
            run = [replace(run[0], data=torch.cat([rows.data for rows in run]))]
        panel_bytes = self._library.functions.warren_panel_bytes(FORMATS[name], inputs)
        panels = allocate(-(-outputs // _PANEL) * panel_bytes)
        first = 0
        for rows in run:
            self._add(rows, panels[first // _PANEL * panel_bytes :])
            first += len(rows.data)
        return panels

    def _add(self, rows: Rows, panels: Tensor) -> None:
        data = rows.data.contiguous()
        rows = replace(rows, data=data)
        view = UnpackedView(
            pointer(data),
            data.nbytes // max(1, len(data)),
            pointer(panels),
            FORMATS[rows.format],
            len(data),
            rows.inputs,
        )
        self._waiting.append((view, rows, panels))
        self._num_bytes += data.nbytes
        is_of_file = data.untyped_storage().nbytes() > data.nbytes
        self._num_copied += 0 if is_of_file else data.nbytes
        if self._num_bytes > _MAX_WAITING or self._num_copied > _MAX_COPIED:
            self.finish()


def pack(
    library: Library, parts: Sequence[Rows], bias: Tensor | None = None, *, num_threads: int = 1
) -> PackedWeight:
    """Pack a matrix at once: see `Packer.pack`."""
    packer = Packer(library, num_threads)
    packed = packer.pack(parts, bias)
    packer.finish()
    return packed
