"""Checkpoints of bitsandbytes with 4-bit codes (NF4 and FP4: Dettmers et al., arXiv:2305.14314)."""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from shared.errors import StartupError
from worker.model.weights.formats.coded import Coded, check_finite, declared, method_of
from worker.model.weights.sources import TensorSource

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


class BitsAndBytes(Coded):
    """Bytes of two codes, of the whole matrix row by row, and the greatest magnitude of each block,
    which may be coded itself."""

    name: ClassVar[str] = "bitsandbytes"
    kinds: ClassVar[str] = "NF4 and FP4"
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
        states = (f"{stem}{name}" for name in _STATES)
        stored = next((name for name in states if source.has(name)), None)
        if stored is None:
            raise StartupError(f"the checkpoint has no tensor {stem}{_STATES[0]}")
        outputs, inputs = _content(source.get(stored))["shape"]
        return int(outputs), int(inputs)

    def decoder(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Callable[[], Tensor]:
        state = _content(next(tensors[name] for name in _STATES if name in tensors))
        values, size = tensors["weight.quant_map"].float(), int(state["blocksize"])
        num_weights = shape[0] * shape[1]
        if tensors["weight"].numel() * 2 != num_weights or values.numel() != 16:
            raise ValueError(f"it has {tensors['weight'].numel()} bytes for {num_weights} weights")
        most = tensors["weight.absmax"]
        if "weight.nested_absmax" in tensors:
            outer, levels = (
                tensors[f"weight.nested_{kind}"].float() for kind in ("absmax", "quant_map")
            )
            outer_size = int(state["nested_blocksize"])
            _check_blocks(outer, outer_size, most.numel())
            if levels.numel() != 256:
                raise ValueError(f"its magnitudes have {levels.numel()} levels, not 256")
            own = outer.repeat_interleave(outer_size)[: most.numel()]
            most = levels[most.long()] * own + float(state["nested_offset"])
        check_finite(most)
        _check_blocks(most, size, num_weights)

        def decode() -> Tensor:
            both = tensors["weight"].flatten().int()
            codes = values[(both.unsqueeze(1) >> both.new_tensor([4, 0]) & 15).flatten()]
            return (codes * most.float().repeat_interleave(size)[:num_weights]).view(shape)

        return decode


def _check_blocks(magnitudes: Tensor, size: int, num_weights: int) -> None:
    """Raise `ValueError` unless each block of this size has a magnitude."""
    if size < 1 or magnitudes.numel() != -(-num_weights // size):
        raise ValueError(
            f"{magnitudes.numel()} blocks of {size} do not cover {num_weights} weights"
        )


def _content(state: Tensor) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(bytes(state.cpu().tolist()))
    return content
