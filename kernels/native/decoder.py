"""A whole step of a decoder in a single call, with packed weights."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native.library import (
    PARTS,
    BatchView,
    CacheView,
    ExpertNormsView,
    ExpertsView,
    JunctionView,
    LatentView,
    LayerInputsView,
    LayerInputView,
    LayerView,
    Library,
    MlpView,
    ModelView,
    NormView,
    RuleView,
    StepView,
    WeightView,
    pointer,
)
from kernels.native.packed import CodeBits, PackedWeight
from kernels.native.paged_attention import cache_view, rule_view
from kernels.native.recurrences import PackedRecurrence
from kernels.router import Router

ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "xielu")
    )
}
"""`Activation` of src/elementwise.hpp."""
SCORES = {"softmax": 0, "sigmoid": 1, "softmax of chosen": 2, "sparse mixer": 3}
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
    constants: Sequence[float] = ()
    """The constants of the activation, at most four."""
    gate_multiplier: float = 1.0

    def view(self) -> MlpView:
        return MlpView(
            gate_up=self.gate_up.view(),
            down=self.down.view(),
            activation=ACTIVATIONS[self.activation],
            is_gated=self.is_gated,
            constants=tuple(self.constants),
            gate_multiplier=self.gate_multiplier,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExpertNorms:
    """See `own_norm` of `worker.model.spec.Experts`."""

    router: PackedNorm
    before: PackedNorm
    after: PackedNorm
    after_shared: PackedNorm

    def view(self) -> ExpertNormsView:
        return ExpertNormsView(
            router=_norm_view(self.router),
            before=_norm_view(self.before),
            after=_norm_view(self.after),
            after_shared=_norm_view(self.after_shared),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """A mixture of experts of the same shape and format."""

    experts: Sequence[PackedMlp]
    router: PackedWeight
    correction: Tensor | None
    """[count] float32."""
    shared: PackedMlp | None
    shared_gate: PackedWeight | None
    rule: Router
    factors: Tensor | None = None
    """[count] float32."""
    latent_down: PackedWeight | None = None
    """[latent_size, hidden_size]; without, the experts read the hidden state."""
    latent_up: PackedWeight | None = None
    """[hidden_size, latent_size]."""
    norms: PackedExpertNorms | None = None

    def __post_init__(self) -> None:
        formats = {(one.gate_up.format, one.down.format) for one in self.experts}
        if len(formats) > 1:
            raise ValueError(f"experts of the formats {sorted(formats)}, expected one format")

    @property
    def chosen(self) -> Sequence[PackedMlp]:
        """As many experts as compute a token."""
        return self.experts[: self.rule.top_k]

    def view(self) -> ExpertsView:
        views = (MlpView * len(self.experts))(*(expert.view() for expert in self.experts))
        shared = None if self.shared is None else ctypes.pointer(self.shared.view())
        return ExpertsView(
            experts=views,
            shared=shared,
            correction=pointer(self.correction),
            factors=pointer(self.factors),
            norms=_pointer(self.norms, ExpertNormsView),
            router=self.router.view(),
            shared_gate=_view(self.shared_gate),
            latent_down=_view(self.latent_down),
            latent_up=_view(self.latent_up),
            count=len(self.experts),
            top_k=self.rule.top_k,
            scores=SCORES[self.rule.scores],
            is_normalized=self.rule.is_normalized,
            num_groups=self.rule.num_groups,
            num_chosen_groups=self.rule.num_chosen_groups,
            weighs_inputs=self.rule.weighs_inputs,
            scale=self.rule.scale,
            spread=self.rule.spread,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLatent:
    """What attention over latent vectors has in addition; see `worker.model.spec.Latent`.

    ``absorb`` is [num_heads * rank, key_dim], ``expand`` [num_heads * value_dim, rank]: the
    matrices of one head after another, whose numbers of outputs are multiples of 16.
    """

    absorb: PackedWeight
    expand: PackedWeight
    query_up: PackedWeight | None
    """None: queries are not compressed."""
    query_norm: PackedNorm | None
    key_dim: int
    value_dim: int

    def view(self) -> LatentView:
        return LatentView(
            query_norm=_norm_view(self.query_norm),
            query_up=_view(self.query_up),
            absorb=self.absorb.view(),
            expand=self.expand.view(),
            rank=self.expand.inputs,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            query_rank=0 if self.query_up is None else self.query_up.inputs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayerInput:
    """How a layer uses its input."""

    gate: PackedWeight
    expansion: PackedWeight
    norm: PackedNorm

    def view(self) -> LayerInputView:
        return LayerInputView(
            gate=self.gate.view(), expansion=self.expansion.view(), norm=_norm_view(self.norm)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayerInputs:
    """The inputs of all layers; see `worker.model.spec.LayerInputs`."""

    table: PackedWeight
    projection: PackedWeight
    norm: PackedNorm
    size: int
    activation: str
    table_scale: float

    def view(self) -> LayerInputsView:
        return LayerInputsView(
            table=self.table.view(),
            projection=self.projection.view(),
            norm=_norm_view(self.norm),
            size=self.size,
            activation=ACTIVATIONS[self.activation],
            table_scale=self.table_scale,
            projection_scale=self.projection.inputs**-0.5,
            scale=2**-0.5,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """A layer; see `worker.model.spec.Layer`. It has attention or a recurrence, or neither."""

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    attention: AttentionSpec | None = None
    qkv: PackedWeight | None = None
    attention_output: PackedWeight | None = None
    recurrence: PackedRecurrence | None = None
    beside: "PackedLayer | None" = None
    """A layer without a feed-forward part, whose attention or recurrence has the same input."""
    feed_forward: PackedMlp | PackedExperts | None = None
    rope_table: Tensor | None = None
    """[max_positions, head_dim] float32, or as many elements of a head as are rotated with latent
    vectors; see `kernels.reference.rope`."""
    latent: PackedLatent | None = None
    temperatures: Tensor | None = None
    """[max_positions] float32: the factors of queries."""
    before_attention: PackedNorm | None = None
    after_attention: PackedNorm | None = None
    before_feed_forward: PackedNorm | None = None
    after_feed_forward: PackedNorm | None = None
    query_norm: PackedNorm | None = None
    key_norm: PackedNorm | None = None
    value_norm: PackedNorm | None = None
    norms_all_heads: bool = False
    """Whether queries and keys are normalized over all heads, rather than each head."""
    norms_after_rope: bool = False
    is_parallel: bool = False
    has_gate: bool = False
    """Whether the last outputs of ``qkv`` are gates of the results."""
    multiplier: float = 1.0
    """The factor of the result of attention, or of the recurrence."""
    feed_forward_multiplier: float = 1.0
    input: PackedLayerInput | None = None
    scalar: float = 1.0

    def view(self) -> LayerView:
        part, recurrence = self.feed_forward, self.recurrence
        mlp = part if isinstance(part, PackedMlp) else None
        experts = part if isinstance(part, PackedExperts) else None
        return LayerView(
            before_attention=_norm_view(self.before_attention),
            after_attention=_norm_view(self.after_attention),
            before_feed_forward=_norm_view(self.before_feed_forward),
            after_feed_forward=_norm_view(self.after_feed_forward),
            query_norm=_norm_view(self.query_norm),
            key_norm=_norm_view(self.key_norm),
            value_norm=_norm_view(self.value_norm),
            qkv=_view(self.qkv if recurrence is None else recurrence.inputs),
            attention_output=_view(
                self.attention_output if recurrence is None else recurrence.output
            ),
            **({} if recurrence is None else recurrence.views()),
            rope_table=pointer(self.rope_table),
            temperatures=pointer(self.temperatures),
            experts=ctypes.pointer(experts.view()) if experts else POINTER(ExpertsView)(),
            latent=ctypes.pointer(self.latent.view()) if self.latent else POINTER(LatentView)(),
            input=_pointer(self.input, LayerInputView),
            rule=RuleView() if self.attention is None else rule_view(self.attention),
            beside=ctypes.pointer(self.beside.view()) if self.beside else POINTER(LayerView)(),
            mlp=mlp.view() if mlp else MlpView(),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norms_all_heads=self.norms_all_heads,
            norms_after_rope=self.norms_after_rope,
            is_parallel=self.is_parallel,
            has_gate=self.has_gate,
            multiplier=self.multiplier,
            feed_forward_multiplier=self.feed_forward_multiplier,
            scalar=self.scalar,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedJunction:
    """How a model that predicts the token after the next makes the input of its first layer; see
    `worker.model.spec.Predictor`. ``projection`` is [hidden_size, 2 * hidden_size]."""

    embedding_norm: PackedNorm
    hidden_norm: PackedNorm
    projection: PackedWeight
    is_hidden_first: bool = False
    """Whether the hidden state is the first half of the projection's inputs."""

    def view(self) -> JunctionView:
        return JunctionView(
            embedding_norm=_norm_view(self.embedding_norm),
            hidden_norm=_norm_view(self.hidden_norm),
            projection=self.projection.view(),
            is_hidden_first=self.is_hidden_first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A model with packed weights. ``embedding`` and ``lm_head`` are the same object if tied."""

    layers: Sequence[PackedLayer]
    embedding: PackedWeight
    norm: PackedNorm
    lm_head: PackedWeight
    embedding_norm: PackedNorm | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    inputs: PackedLayerInputs | None = None
    junction: PackedJunction | None = None
    code_bits: CodeBits = 8


def num_multiplications(model: PackedModel) -> int:
    """The number of weights with which a token is multiplied, once if it is sampled."""
    parts = (model.layers, model.lm_head, model.inputs and model.inputs.projection, model.junction)
    return sum(map(_num_weights, parts))


def _num_weights(part: Any) -> int:
    """The number of weights in matrices of a part with which a token is multiplied."""
    match part:
        case PackedWeight():
            return part.outputs * part.inputs
        case PackedExperts():
            apart = [getattr(part, one.name) for one in fields(part) if one.name != "experts"]
            return sum(map(_num_weights, (*apart, *part.chosen)))
        case list() | tuple():
            return sum(map(_num_weights, part))
    if is_dataclass(part):
        return sum(_num_weights(getattr(part, one.name)) for one in fields(part))
    return 0


def _pointer(part: Any, kind: type[Structure]) -> Any:
    """A pointer to the view of a part, or null."""
    return POINTER(kind)() if part is None else ctypes.pointer(part.view())


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
            embedding_norm=_norm_view(model.embedding_norm),
            norm=_norm_view(model.norm),
            lm_head=model.lm_head.view(),
            inputs=_pointer(model.inputs, LayerInputsView),
            junction=_pointer(model.junction, JunctionView),
            num_layers=len(model.layers),
            code_bits=model.code_bits,
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

    def prepare(
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
        states: Tensor | None = None,
        num_state_blocks: int = 0,
        hidden: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Describe a step. The returned function runs it, and returns the logits of the sampled
        rows, [num_sampled, vocab_size] float32.

        The index tensors are described in `kernels.reference.store_kv` and `paged_attention`; each
        group of layers has its own ``slots`` and ``block_tables``. The caches are [num_places,
        num_blocks, block_size, num_kv_heads, head_dim], and ``places`` [num_layers, 2] int32 has
        the group and the place of each layer. With recurrent layers, ``states``, [num_layers]
        int32, has the first piece of each layer's state (see `CacheLayout` in
        `worker.model.cache_layout`), and the last group's tables have the ``num_state_blocks``
        blocks of the state that the step reads, then the blocks of the state that it writes.
        ``hidden``, [num_tokens, hidden_size] float32, receives the last hidden states after their
        norm; a model with a junction reads them, and its ``token_ids`` are the next tokens. The
        result is overwritten by the next step. A row's result is bit-identical whatever else is in
        the step. The function raises `MemoryError` if the activations cannot be allocated.
        """
        logits = self._room_for(len(sampled_rows))
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
            pointer(states),
            len(block_tables) - 1,
            num_state_blocks,
            len(keys),
            len(token_ids),
            len(sampled_rows),
            None,
            pointer(hidden),
        )
        tensors = (token_ids, positions, slots, sampled_rows, keys, values, places, block_tables)
        kept = (*tensors, query_starts, context_lens, states, hidden)
        layer_bytes = keys.stride(0) * keys.element_size()
        return partial(self._run, step, cache, layer_bytes, logits, kept)

    def _run(
        self, step: StepView, cache: CacheView, layer_bytes: int, logits: Tensor, _kept: object
    ) -> Tensor:
        """Run a step. The tensors that it has the addresses of are kept by the last argument."""
        seconds = self._seconds  # kept during the call: `profile` may replace it
        step.seconds = pointer(seconds)
        failed = self._library.functions.warren_forward(
            self._team,
            self._workspace,
            ctypes.byref(self._view),
            ctypes.byref(cache),
            layer_bytes,
            ctypes.byref(step),
        )
        if failed:
            raise MemoryError("no memory for the activations of a step")
        return logits

    def _room_for(self, num_rows: int) -> Tensor:
        # Megabytes that were freed after each step would be cleared again before the next step.
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._model.lm_head.outputs)
        return self._logits[:num_rows]
