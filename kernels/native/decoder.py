"""A whole step of a decoder in one call, with packed weights."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native.library import (
    PARTS,
    BatchView,
    ExpertsView,
    LayerView,
    Library,
    MlpView,
    ModelView,
    NormView,
    StepView,
    WeightView,
    pointer,
)
from kernels.native.packed import PackedWeight
from kernels.native.paged_attention import cache_view, rule_view
from kernels.router import Router

ACTIVATIONS = {
    name: number
    for number, name in enumerate(("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"))
}
"""`Activation` of src/elementwise.hpp."""
SCORES = {"softmax": 0, "sigmoid": 1, "softmax of chosen": 2}
"""`Scores` of src/experts.hpp."""
_NORMS = {"rms": 1, "layer": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedNorm:
    """``kind`` is "rms" or "layer". The vectors are float32, [width]."""

    kind: str
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMlp:
    """``activation`` is one of `ACTIVATIONS`. Without a gate, ``gate_up`` is the first product."""

    gate_up: PackedWeight
    down: PackedWeight
    activation: str = "silu"
    is_gated: bool = True

    def view(self) -> MlpView:
        return MlpView(
            gate_up=self.gate_up.view(),
            down=self.down.view(),
            activation=ACTIVATIONS[self.activation],
            is_gated=self.is_gated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """A mixture of experts of one shape and format."""

    experts: Sequence[PackedMlp]
    router: PackedWeight
    correction: Tensor | None
    """[count] float32."""
    shared: PackedMlp | None
    shared_gate: PackedWeight | None
    rule: Router

    def __post_init__(self) -> None:
        formats = {(one.gate_up.format, one.down.format) for one in self.experts}
        if len(formats) > 1:
            raise ValueError(f"experts of the formats {sorted(formats)}, expected one format")

    def view(self) -> ExpertsView:
        views = (MlpView * len(self.experts))(*(expert.view() for expert in self.experts))
        shared = None if self.shared is None else ctypes.pointer(self.shared.view())
        return ExpertsView(
            experts=views,
            shared=shared,
            correction=pointer(self.correction),
            router=self.router.view(),
            shared_gate=_view(self.shared_gate),
            count=len(self.experts),
            top_k=self.rule.top_k,
            scores=SCORES[self.rule.scores],
            is_normalized=self.rule.is_normalized,
            num_groups=self.rule.num_groups,
            num_chosen_groups=self.rule.num_chosen_groups,
            weighs_inputs=self.rule.weighs_inputs,
            scale=self.rule.scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """One layer; see `worker.model.spec.Layer`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: AttentionSpec
    qkv: PackedWeight
    attention_output: PackedWeight
    feed_forward: PackedMlp | PackedExperts
    rope_table: Tensor
    """[max_positions, head_dim] float32; see `kernels.reference.rope`."""
    temperatures: Tensor | None = None
    """[max_positions] float32: the factors of queries."""
    before_attention: PackedNorm | None
    after_attention: PackedNorm | None = None
    before_feed_forward: PackedNorm | None
    after_feed_forward: PackedNorm | None = None
    query_norm: PackedNorm | None = None
    key_norm: PackedNorm | None = None
    value_norm: PackedNorm | None = None
    norms_all_heads: bool = False
    """Whether queries and keys are normalized over all heads, rather than each head."""
    norms_after_rope: bool = False
    is_parallel: bool = False
    multiplier: float = 1.0
    scalar: float = 1.0

    def view(self) -> LayerView:
        part = self.feed_forward
        is_mixture = isinstance(part, PackedExperts)
        return LayerView(
            before_attention=_norm_view(self.before_attention),
            after_attention=_norm_view(self.after_attention),
            before_feed_forward=_norm_view(self.before_feed_forward),
            after_feed_forward=_norm_view(self.after_feed_forward),
            query_norm=_norm_view(self.query_norm),
            key_norm=_norm_view(self.key_norm),
            value_norm=_norm_view(self.value_norm),
            qkv=self.qkv.view(),
            attention_output=self.attention_output.view(),
            rope_table=pointer(self.rope_table),
            temperatures=pointer(self.temperatures),
            experts=ctypes.pointer(part.view()) if is_mixture else POINTER(ExpertsView)(),
            rule=rule_view(self.attention),
            mlp=MlpView() if is_mixture else part.view(),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norms_all_heads=self.norms_all_heads,
            norms_after_rope=self.norms_after_rope,
            is_parallel=self.is_parallel,
            multiplier=self.multiplier,
            scalar=self.scalar,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A model with packed weights. ``embedding`` and ``lm_head`` are the same object if tied."""

    layers: Sequence[PackedLayer]
    embedding: PackedWeight
    norm: PackedNorm
    lm_head: PackedWeight
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def _view(weight: PackedWeight | None) -> WeightView:
    return WeightView() if weight is None else weight.view()


def _norm_view(norm: PackedNorm | None) -> NormView:
    if norm is None:
        return NormView()
    return NormView(
        weight=pointer(norm.weight),
        bias=pointer(norm.bias),
        kind=_NORMS[norm.kind],
        eps=norm.eps,
    )


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
            layers=self._layers,
            embedding=model.embedding.view(),
            norm=_norm_view(model.norm),
            lm_head=model.lm_head.view(),
            num_layers=len(model.layers),
            embedding_scale=model.embedding_scale,
            logit_scale=model.logit_scale,
            logit_softcap=model.logit_softcap or 0.0,
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
        places: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
    ) -> Tensor:
        """Return the logits of the sampled rows, [num_sampled, vocab_size] float32.

        The index tensors are those of `kernels.reference.store_kv` and `paged_attention`, of which
        each group of layers has its own ``slots`` and ``block_tables``. The caches are [num_places,
        num_blocks, block_size, num_kv_heads, head_dim], and ``places`` [num_layers, 2] int32 has
        the group and the place of each layer. The result is overwritten by the next call. A row's
        result is bit-identical whatever else is in the step. Raises `MemoryError` if the
        activations cannot be allocated.
        """
        logits = self._room_for(len(sampled_rows))
        seconds = self._seconds  # kept during the call: `profile` may replace it
        cache = cache_view(keys[0], values[0])
        step = StepView(
            pointer(token_ids),
            pointer(positions),
            pointer(slots[0]),
            pointer(sampled_rows),
            pointer(logits),
            BatchView(
                pointer(block_tables),
                pointer(query_starts),
                pointer(context_lens),
                len(context_lens),
                block_tables.shape[2],
            ),
            slots.stride(0),
            pointer(places),
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
