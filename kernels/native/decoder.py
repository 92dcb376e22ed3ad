"""A whole step of a decoder of the Llama family in one call, with packed weights."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.library import (
    PARTS,
    BatchView,
    LayerView,
    Library,
    ModelView,
    StepView,
    pointer,
)
from kernels.native.packed import PackedWeight
from kernels.native.paged_attention import cache_view


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer. The weights of norms are float32, [hidden_size] or [head_dim]."""

    input_norm: Tensor
    qkv: PackedWeight
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    sliding_window: int | None

    def view(self) -> LayerView:
        return LayerView(
            pointer(self.input_norm),
            self.qkv.view(),
            pointer(self.query_norm),
            pointer(self.key_norm),
            self.attention_output.view(),
            pointer(self.mlp_norm),
            self.gate_up.view(),
            self.down.view(),
            self.sliding_window or 0,
        )


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model with packed weights. ``embedding`` and ``lm_head`` are the same object if tied."""

    layers: Sequence[PackedLayer]
    embedding: PackedWeight
    norm: Tensor
    lm_head: PackedWeight
    rope_table: Tensor
    """[max_positions, head_dim] float32; see `kernels.reference.rope`."""
    num_heads: int
    eps: float
    scale: float


class PackedDecoder:
    """Runs steps of a `PackedModel` on ``num_threads`` threads, one step at a time."""

    def __init__(self, library: Library, model: PackedModel, num_threads: int) -> None:
        self._library = library
        self._model = model
        self._team = library.team(num_threads)
        self._workspace = library.workspace(self)
        self._logits = torch.empty(0, model.lm_head.outputs)
        self._seconds: Tensor | None = None
        self._layers = (LayerView * len(model.layers))(*(layer.view() for layer in model.layers))
        self._view = ModelView(
            self._layers,
            model.embedding.view(),
            pointer(model.norm),
            model.lm_head.view(),
            pointer(model.rope_table),
            len(model.layers),
            model.num_heads,
            model.eps,
            model.scale,
        )

    def profile(self) -> dict[str, float]:
        """Seconds spent in each part of a step since the last call; the first call starts the
        measurement."""
        counted = self._seconds
        self._seconds = torch.zeros(len(PARTS), dtype=torch.float64)
        return {} if counted is None else dict(zip(PARTS, counted.tolist(), strict=True))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sampled_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
    ) -> Tensor:
        """Return the logits of the sampled rows, [num_sampled, vocab_size] float32.

        The index tensors are those of `kernels.reference.store_kv` and `paged_attention`, the
        caches are [num_layers, num_blocks, block_size, num_kv_heads, head_dim]. The result is
        overwritten by the next call. A row's result is bit-identical whatever else is in the step.
        Raises `MemoryError` if the activations cannot be allocated.
        """
        logits = self._room_for(len(sampled_rows))
        seconds = self._seconds  # kept during the call: `profile` may replace it
        cache = cache_view(keys[0], values[0])
        step = StepView(
            pointer(token_ids),
            pointer(positions),
            pointer(slots),
            pointer(sampled_rows),
            pointer(logits),
            BatchView(
                pointer(block_tables),
                pointer(query_starts),
                pointer(context_lens),
                len(context_lens),
                block_tables.shape[1],
            ),
            len(token_ids),
            len(sampled_rows),
            pointer(seconds),
        )
        failed = self._library.functions.warren_forward(
            self._team,
            self._workspace,
            ctypes.byref(self._view),
            ctypes.byref(cache),
            keys.stride(0) * keys.element_size(),
            ctypes.byref(step),
        )
        if failed:
            raise MemoryError("no memory for the activations of a step")
        return logits

    def _room_for(self, num_rows: int) -> Tensor:
        # Megabytes that were freed after each step would be cleared again before the next one.
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._model.lm_head.outputs)
        return self._logits[:num_rows]
