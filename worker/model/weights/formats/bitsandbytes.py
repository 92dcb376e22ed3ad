"""Checkpoints of bitsandbytes with 4-bit codes (NF4 and FP4: Dettmers et al., arXiv:2305.14314)."""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.providers import Provider
from kernels.quantized import QuantizedWeight
from kernels.scaled_floats import GROUPS, VALUES, scaled_groups
from shared.errors import StartupError
from worker.model.weights.formats.coded import Coded, check_finite, declared, method_of
from worker.model.weights.sources import TensorSource

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


class BitsAndBytes(Coded):
    """Bytes of two codes, of the whole matrix row by row, and the greatest magnitude of each block,
    which may be coded itself."""

    name: ClassVar[str] = "bitsandbytes"
    kinds: ClassVar[str] = "NF4 and FP4"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native"})
    bytes_per_weight: ClassVar[str] = "0.56 on the CPU, those of the data type on a GPU"
    numerics: ClassVar[str] = "fused float4"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {
            *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax"),
            *("weight.nested_quant_map", *_STATES),
        }
    )
    descriptions: ClassVar[frozenset[str]] = frozenset(_STATES)

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        if method_of(config) != "bitsandbytes":
            return None
        if not (declared(config) or {}).get("load_in_4bit"):
            raise StartupError(
                "the model's weights are quantized with bitsandbytes (8 bits), which is not "
                "supported: only its 4-bit formats are"
            )
        return cls()

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        return source.has(f"{stem}weight.absmax")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        outputs, inputs = _stored_state(source, stem)[1]["shape"]
        return int(outputs), int(inputs)

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        values, size = tensors["weight.quant_map"].float(), int(_state(tensors)["blocksize"])
        num_weights = shape[0] * shape[1]
        if tensors["weight"].numel() * 2 != num_weights or values.numel() != 16:
            raise ValueError(f"it has {tensors['weight'].numel()} bytes for {num_weights} weights")
        most = _magnitudes(tensors)
        check_finite(most)
        _check_blocks(most, size, num_weights)

        def decode() -> Tensor:
            both = tensors["weight"].flatten().int()
            codes = values[(both.unsqueeze(1) >> both.new_tensor([4, 0]) & 15).flatten()]
            return (codes * most.float().repeat_interleave(size)[:num_weights]).view(shape)

        return decode

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        name, state = _stored_state(source, stem)
        kept = name.rpartition("__")[2]
        sizes = (int(state["blocksize"]), self.shape(source, stem)[1])
        return kept if all(size > 0 and size % GROUPS[kept] == 0 for size in sizes) else None

    def blocks(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_format: str
    ) -> QuantizedWeight | None:
        if not torch.equal(tensors["weight.quant_map"].float(), VALUES[block_format]):
            return None
        size = GROUPS[block_format]
        own = _magnitudes(tensors).float()
        scales = own.repeat_interleave(int(_state(tensors)["blocksize"]) // size)
        codes = tensors["weight"].view(shape[0], -1)
        grid = scales[: shape[0] * shape[1] // size].view(shape[0], -1)
        groups = scaled_groups(block_format, codes, grid)
        return None if groups is None else QuantizedWeight(block_format, groups)


def _magnitudes(tensors: Mapping[str, Tensor]) -> Tensor:
    """The greatest magnitude of each block. Raises `ValueError` if it cannot be decoded."""
    most = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return most
    state = _state(tensors)
    outer, levels = (tensors[f"weight.nested_{kind}"].float() for kind in ("absmax", "quant_map"))
    outer_size = int(state["nested_blocksize"])
    _check_blocks(outer, outer_size, most.numel())
    if levels.numel() != 256:
        raise ValueError(f"its magnitudes have {levels.numel()} levels, not 256")
    own = outer.repeat_interleave(outer_size)[: most.numel()]
    return levels[most.long()] * own + float(state["nested_offset"])


def _check_blocks(magnitudes: Tensor, size: int, num_weights: int) -> None:
    """Raise `ValueError` unless each block of this size has a magnitude."""
    if size < 1 or magnitudes.numel() != -(-num_weights // size):
        raise ValueError(
            f"{magnitudes.numel()} blocks of {size} do not cover {num_weights} weights"
        )


def _stored_state(source: TensorSource, stem: str) -> tuple[str, dict[str, Any]]:
    """The name and the content of a matrix's description. Raises `StartupError` if there is
    none."""
    names = (f"{stem}{name}" for name in _STATES)
    stored = next((name for name in names if source.has(name)), None)
    if stored is None:
        raise StartupError(f"the checkpoint has no tensor {stem}{_STATES[0]}")
    return stored, _content(source.get(stored))


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return _content(next(tensors[name] for name in _STATES if name in tensors))


def _content(state: Tensor) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(bytes(state.cpu().tolist()))
    return content
