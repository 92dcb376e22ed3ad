"""The weights of a native decoder, with matrices fused as they are multiplied."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.spec import (
    Attention,
    DeltaNet,
    Experts,
    Latent,
    Layer,
    LayerNames,
    Mlp,
    ModelSpec,
    Norm,
)
from worker.model.weights.derived import (
    Made,
    absorbing,
    delta_heads,
    derived,
    expanding,
    expert_name,
    gate_name,
    gated_heads,
    heads_apart,
    latent_heads,
    rotated_heads,
    router_norm,
    single_experts,
    values_from_keys,
    with_stored_experts,
)
from worker.model.weights.formats.blocks import Gguf, Quantized
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.recurrences import recurrence_of
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent
from worker.model.weights.sources import TensorSource
from worker.model.weights.stacked import StackedMlps, stacked
from worker.model.weights.weight import DenseWeight, Linear, Weight

logger = logging.getLogger(__name__)

_OF_FLOATS = (Dense.name, Quantized.name)
"""The formats of checkpoints whose small matrices are not read in these formats."""
_WITHOUT_EFFECT = re.compile(
    r"(?:\w+\.)+layers\.\d+\.(?:(?:self_attn|mixer)\.(?:rotary_emb\.inv_freq"
    r"|(?:[kv]_proj\.)?[kv]_scale)|mlp\.experts\.\w+_activation_scale)"
)
"""The frequencies are stored by old versions of transformers and redundant with the configuration.
The scales are for engines that keep the KV cache, or the inputs of experts, in float8."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The vectors of a norm, each [width]. If 1 has been added to weights that are stored without
    it, they are float32."""

    weight: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What attention over latent vectors has in addition. ``qkv`` makes the query, or the vector
    that queries are made from, then the latent vector and the rotary key. ``query_norm`` and
    ``key_norm`` are the norms of the vectors."""

    query_up: Linear | None
    """[query_size, query_rank]."""
    absorb: Linear
    """[num_heads * rank, key_dim]: multiplied with a head's query."""
    expand: Linear
    """[num_heads * value_dim, rank]: multiplied with a head's result."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The heads of queries and keys have the order in which halves are rotated: see
    `worker.model.weights.rotation`."""

    qkv: Linear
    output: Linear
    query_norm: NormWeights | None = None
    key_norm: NormWeights | None = None
    sinks: Tensor | None = None
    """[num_heads] float32."""
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """``gate_up`` is only the first product if there is no gate."""

    gate_up: Linear
    down: Linear
    constants: tuple[float, ...] = ()
    """The constants of the activation."""


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """The norms of `Experts.own_norm`."""

    router: NormWeights
    before: NormWeights
    after: NormWeights
    after_shared: NormWeights


@dataclass(frozen=True, slots=True)
class ExpertLatents:
    """The products of `Experts.latent_size`."""

    down: Linear
    """[latent_size, hidden_size]."""
    up: Linear
    """[hidden_size, latent_size]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``router`` is [num_experts, hidden_size]."""

    router: Linear
    correction: Tensor | None
    """[num_experts] float32."""
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights | None
    shared_gate: Linear | None
    """[1, hidden_size]."""
    factors: Tensor | None = None
    """[num_experts] float32."""
    latents: ExpertLatents | None = None
    stacked: StackedMlps | None = None
    """``experts`` in the same memory, for a provider that computes them together. None if it has
    no kernel for their format."""
    norms: ExpertNorms | None = None


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """How a layer uses its input; see `LayerInputs`."""

    gate: Linear
    """[size, hidden_size]."""
    expansion: Linear
    """[hidden_size, size]."""
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class LayerInputsWeights:
    """The inputs of all layers, one after another."""

    table: Weight
    """[vocab_size, num_layers * size]."""
    projection: Linear
    """[num_layers * size, hidden_size]."""
    norm: NormWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A layer. Its parts and their norms are None where the layer has none."""

    attention: AttentionWeights | None = None
    recurrence: Recurrent | None = None
    feed_forward: MlpWeights | ExpertWeights | None = None
    before_attention: NormWeights | None
    after_attention: NormWeights | None = None
    before_feed_forward: NormWeights | None
    after_feed_forward: NormWeights | None = None
    input: LayerInputWeights | None = None
    scalar: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. ``embedding`` and ``lm_head`` are [vocab_size, hidden_size], the same object if
    tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    lm_head: Weight
    dtype: torch.dtype
    """The type of activations."""
    head_bias: Tensor | None = None
    """[vocab_size]."""
    embedding_norm: NormWeights | None = None
    layer_inputs: LayerInputsWeights | None = None


class WeightReader:
    """Reads the weights of a checkpoint part by part, without keeping them.

    Raises `StartupError` if a tensor is missing, has the wrong shape or cannot be packed.
    """

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        stored_as: Format,
        target: Target,
        *,
        vector_dtype: torch.dtype | None = None,
    ) -> None:
        """Matrices without a kernel of the target's provider are expanded to its data type.

        ``vector_dtype`` is the type of norms and biases, by default the target's.
        """
        self._spec = spec
        self._names = spec.names
        self.source = source
        """The checkpoint itself."""
        self._prefix = self._names.prefix_in(source.has)
        self._embedding_name = f"{self._prefix}{self._names.embedding}.weight"
        with_experts = (
            index for index, one in enumerate(spec.layers) if isinstance(one.feed_forward, Experts)
        )
        for index in with_experts:
            self._names = with_stored_experts(self._names, source, self._layer_prefix(index))
        self._source = derived(source, self._made(source, stored_as.stacked_parts))
        self._format = stored_as
        self._target = target
        self._vector_dtype = vector_dtype or target.dtype
        self._num_expanded = 0

    def of_part(self, spec: ModelSpec) -> "WeightReader":
        """A reader of further layers of the same checkpoint, stored in the same format."""
        return WeightReader(
            self.source, spec, self._format, self._target, vector_dtype=self._vector_dtype
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type to which floats are converted."""
        return self._target.dtype

    @property
    def numerics(self) -> str:
        """The name of the native decoder's arithmetic with these weights."""
        return self._format.numerics

    @cached_property
    def _head(self) -> str | None:
        """The name of the output projection, if it is stored."""
        names = (f"{name}.weight" for name in self._names.heads)
        return next((name for name in names if self._source.has(name)), None)

    @cached_property
    def is_tied(self) -> bool:
        """Whether the embedding is also the output projection.

        As in transformers, it is not if another projection is stored. Models for embeddings, which
        need none, may have been saved without it.
        """
        if self._head is None:
            is_for_embeddings = (self._source.directory / "modules.json").exists()
            return self._spec.has_tied_embeddings or is_for_embeddings
        return self._spec.has_tied_embeddings and torch.equal(
            self._source.get(self._head), self._source.get(self._embedding_name)
        )

    @property
    def layer_names(self) -> LayerNames:
        return self._names.layers

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    def linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """A matrix in the format of the checkpoint. Several names are the parts of one matrix."""
        return Linear(
            self._usable(self._matrix(names, shape, self._format, self._target)),
            self._vector([f"{name}.bias" for name in names], shape[0]) if has_bias else None,
        )

    def float_linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """A small matrix, which is expanded if the checkpoint has it packed."""
        stored_as = self._format
        if stored_as.name in _OF_FLOATS:
            stored_as = Gguf() if self.source.container == Gguf.name else Dense()
        target = Target(self._vector_dtype, self._target.device)
        weight = self._matrix(names, shape, stored_as, target)
        floats = weight.dense(target.dtype) if target.device.type != "meta" else None
        bias = self._vector([f"{name}.bias" for name in names], shape[0]) if has_bias else None
        return Linear(weight if floats is None else DenseWeight(floats), bias)

    def _matrix(
        self, names: Sequence[str], shape: tuple[int, int], stored_as: Format, target: Target
    ) -> Weight:
        """A matrix of the named parts."""
        stored = [f"{name}.weight" for name in names]
        return self._source.matrix(stored_as, stored, shape, target)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as float32."""
        return self.stacked_floats([name], shape)

    def stacked_floats(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """A tensor whose parts have these names, as float32."""
        return self._source.read(list(names), shape, torch.float32, self._target.device)

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""
        return self._table(self._embedding_name)

    def embedding_norm(self) -> NormWeights | None:
        """None for most models."""
        spec = self._spec.embedding_norm
        name = f"{self._prefix}{self._names.embedding_norm}"
        return None if spec is None else self.named_norm(name, spec)

    def lm_head(self) -> Weight:
        """[vocab_size, hidden_size]; only if it is not tied."""
        return self._table(self._head or f"{self._names.heads[0]}.weight")

    def head_bias(self) -> Tensor | None:
        """[vocab_size]; None for most models."""
        if not self._spec.has_head_bias:
            return None
        return self._vector([f"{self._names.heads[0]}.bias"], self._spec.vocab_size)

    def layer_inputs(self) -> LayerInputsWeights | None:
        """None for most models."""
        spec, names = self._spec.layer_inputs, self._names
        if spec is None:
            return None
        width = self._spec.num_layers * spec.size
        return LayerInputsWeights(
            table=self._table(
                f"{self._prefix}{names.input_table}.weight", (spec.vocab_size, width)
            ),
            projection=self.linear(
                [f"{self._prefix}{names.input_projection}"],
                (width, self._spec.hidden_size),
                has_bias=False,
            ),
            norm=self._norm(f"{self._prefix}{names.input_norm}", spec.norm, spec.size),
        )

    def layers(self) -> Iterator[LayerWeights]:
        """Read the layers in turn."""
        return (
            self._layer(self._layer_prefix(index), layer)
            for index, layer in enumerate(self._spec.layers)
        )

    def norm(self) -> NormWeights:
        return self.named_norm(f"{self._prefix}{self._names.final_norm}", self._spec.final_norm)

    def named_norm(self, name: str, spec: Norm) -> NormWeights:
        """A norm of hidden states."""
        return self._norm(name, spec, self._spec.hidden_size)

    def check_complete(self) -> None:
        """Raise `StartupError` if a tensor of the checkpoint was not used, which would silently
        change the model, and warn of matrices that take more memory than in the checkpoint."""
        self._refuse_unread()
        if self._num_expanded:
            logger.warning(
                "the weights are expanded: these kernels cannot multiply their format",
                extra={"format": self._format.name, "bytes": self._num_expanded},
            )

    def _refuse_unread(self) -> None:
        left = [name for name in self._source.unread if not _WITHOUT_EFFECT.fullmatch(name)]
        if self._names.is_within:  # the other models of the checkpoint are not read
            left = [one for one in left if one.startswith(f"{self._prefix}{self._names.layer}.")]
        if self._names.has_further_layers:
            layers = tuple(self._layer_prefix(index) for index in range(self._spec.num_layers))
            further = f"{self._prefix}{self._names.layer}."
            left = [n for n in left if n.startswith(layers) or not n.startswith(further)]
        further_parts = tuple(f"{self._prefix}{part}" for part in self._names.further_parts)
        left = [name for name in left if not name.startswith((*further_parts, *self._unused()))]
        if left:
            raise StartupError(
                f"{len(left)} tensors are not part of the model that config.json describes, e.g. "
                f"{left[0]}"
            )

    def _unused(self) -> Iterator[str]:
        """How the names of keys and values begin that layers have, but do not use."""
        names = self._names.layers
        for index, attention in enumerate(layer.attention for layer in self._spec.layers):
            if attention is not None and attention.kv_from is not None:
                unused = (*names.qkv[1:], names.key_norm, names.value_norm)
                yield from (f"{self._layer_prefix(index)}{name}." for name in unused)

    def rehearse(self) -> None:
        """Raise the `StartupError` that reading everything would raise for names and shapes. The
        source needs no data if the target is the meta device."""
        self.embedding()
        self.embedding_norm()
        self.layer_inputs()
        for _ in self.layers():
            pass
        self.norm()
        if self._head is not None or not self.is_tied:
            self.lm_head()
        self.head_bias()
        self._refuse_unread()

    def _layer_prefix(self, index: int) -> str:
        return f"{self._prefix}{self._names.layer}.{self._names.first_layer + index}."

    def _made(self, source: TensorSource, stacked_parts: Mapping[str, str]) -> Iterator[Made]:
        """The tensors that are not stored as they are used."""
        names = self._names.layers
        for index, layer in enumerate(self._spec.layers):
            prefix = self._layer_prefix(index)
            if layer.attention is not None:
                latent = layer.attention.latent
                yield (
                    rotated_heads(layer.attention, names, prefix)
                    if latent is None
                    else latent_heads(layer.attention, latent, names.latent, prefix)
                )
                if names.are_heads_together:
                    yield heads_apart(layer.attention, names, prefix)
                if layer.attention.has_gate:
                    yield gated_heads(layer.attention, names, prefix)
                if layer.attention.values_are_keys:
                    yield values_from_keys(layer.attention, names, prefix)
            if isinstance(layer.recurrence, DeltaNet):
                yield delta_heads(layer.recurrence, names.delta, prefix)
            part = layer.feed_forward
            if isinstance(part, Experts) and "{}" not in names.expert_down:
                yield single_experts(part, names, prefix, source, stacked_parts)
            if isinstance(part, Experts) and part.own_norm is not None:
                yield router_norm(names, prefix, self._spec.hidden_size)

    def _table(self, name: str, shape: tuple[int, int] | None = None) -> Weight:
        shape = shape or (self._spec.vocab_size, self._spec.hidden_size)
        return self._usable(self._format.read_table(self._source, name, shape, self._target))

    def _layer(self, prefix: str, layer: Layer) -> LayerWeights:
        names, part = self._names.layers, layer.feed_forward

        def norm(name: str, spec: Norm | None) -> NormWeights | None:
            size = self._spec.hidden_size
            return None if spec is None else self._norm(self._stored(prefix, name), spec, size)

        return LayerWeights(
            before_attention=norm(names.before_attention, layer.before_attention),
            attention=None if layer.attention is None else self._attention(prefix, layer.attention),
            recurrence=None
            if layer.recurrence is None
            else recurrence_of(layer.recurrence, _LayerTensors(self, prefix)),
            feed_forward=None if part is None else self._feed_forward(prefix, part),
            after_attention=norm(names.after_attention, layer.after_attention),
            before_feed_forward=norm(names.before_feed_forward, layer.before_feed_forward),
            after_feed_forward=norm(names.after_feed_forward, layer.after_feed_forward),
            input=self._layer_input(prefix),
            scalar=float(self._source.get(f"{prefix}{names.scalar}")) if layer.has_scalar else 1.0,
        )

    def _stored(self, prefix: str, name: str) -> str:
        """The name of a tensor in the checkpoint, where it may have another name."""
        other = self._names.layers.others.get(name)
        is_other = other is not None and self._source.has(f"{prefix}{other}.weight")
        return f"{prefix}{other}" if is_other else f"{prefix}{name}"

    def _layer_input(self, prefix: str) -> LayerInputWeights | None:
        spec, names, hidden = self._spec.layer_inputs, self._names.layers, self._spec.hidden_size
        if spec is None:
            return None
        return LayerInputWeights(
            gate=self.linear([f"{prefix}{names.input_gate}"], (spec.size, hidden), has_bias=False),
            expansion=self.linear(
                [f"{prefix}{names.input_expansion}"], (hidden, spec.size), has_bias=False
            ),
            norm=self._norm(f"{prefix}{names.after_input}", spec.norm, hidden),
        )

    def _attention(self, prefix: str, spec: Attention) -> AttentionWeights:
        if spec.latent is not None:
            return self._latent_attention(prefix, spec, spec.latent)
        names, hidden = self._names.layers, self._spec.hidden_size
        gates = [gate_name(names.qkv[0])] if spec.has_gate else []
        sinks = None
        if spec.has_sinks:
            sinks = self.floats(f"{prefix}{names.sinks}", (spec.num_heads,))
        is_own = spec.kv_from is None
        qkv = names.qkv if is_own else names.qkv[:1]
        return AttentionWeights(
            qkv=self.linear(
                [f"{prefix}{name}" for name in (*qkv, *gates)],
                (spec.qkv_size, hidden),
                has_bias=spec.has_qkv_bias,
            ),
            output=self.linear(
                [f"{prefix}{names.attention_output}"],
                (hidden, spec.attended_size),
                has_bias=spec.has_output_bias,
            ),
            query_norm=self._head_norm(f"{prefix}{names.query_norm}", spec, spec.num_heads),
            key_norm=self._head_norm(f"{prefix}{names.key_norm}", spec, spec.num_kv_heads)
            if is_own
            else None,
            sinks=sinks,
        )

    def _latent_attention(self, prefix: str, spec: Attention, latent: Latent) -> AttentionWeights:
        names, hidden, rank = self._names.layers.latent, self._spec.hidden_size, latent.query_rank
        query = names.query if rank is None else names.query_down

        def heads(name: str, size: int, inputs: int) -> Linear:
            return self.linear([f"{prefix}{name}"], (size, inputs), has_bias=False)

        return AttentionWeights(
            qkv=self.linear(
                [f"{prefix}{query}", f"{prefix}{names.down}"],
                (spec.qkv_size, hidden),
                has_bias=spec.has_qkv_bias,
            ),
            output=self.linear(
                [f"{prefix}{self._names.layers.attention_output}"],
                (hidden, spec.attended_size),
                has_bias=spec.has_output_bias,
            ),
            query_norm=None
            if rank is None
            else self._norm(f"{prefix}{names.query_norm}", latent.norm, rank),
            key_norm=self._norm(f"{prefix}{names.norm}", latent.norm, latent.rank),
            latent=LatentWeights(
                query_up=None if rank is None else heads(names.query_up, spec.query_size, rank),
                absorb=heads(absorbing(names), spec.num_heads * latent.rank, latent.key_dim),
                expand=heads(expanding(names), spec.attended_size, latent.rank),
            ),
        )

    def _head_norm(self, name: str, spec: Attention, num_heads: int) -> NormWeights | None:
        if spec.qk_norm is None:
            return None
        size = spec.head_dim * (1 if spec.qk_norm.over == "head" else num_heads)
        return self._norm(name, spec.qk_norm.norm, size)

    def _feed_forward(self, prefix: str, spec: Mlp | Experts) -> MlpWeights | ExpertWeights:
        if isinstance(spec, Experts):
            return self._experts(prefix, spec)
        names = self._names.layers
        return self._mlp(prefix, names.gate_up, names.down, spec)

    def _mlp(
        self, prefix: str, gate_up: Sequence[str], down: str, spec: Mlp, width: int | None = None
    ) -> MlpWeights:
        """``width`` is the length of inputs and outputs, by default that of the hidden state."""
        hidden = width or self._spec.hidden_size
        return MlpWeights(
            gate_up=self.linear(
                [self._stored(prefix, name) for name in gate_up],
                (spec.size * (2 if spec.is_gated else 1), hidden),
                has_bias=spec.has_bias,
            ),
            down=self.linear(
                [self._stored(prefix, down)], (hidden, spec.size), has_bias=spec.has_bias
            ),
            constants=self._xielu(prefix) if spec.activation == "xielu" else (),
        )

    def _xielu(self, prefix: str) -> tuple[float, ...]:
        """The constants of the activation xIELU, in the order of its operation."""
        stem = f"{prefix}{self._names.layers.activation}"
        positive, negative, linear, nearest = (
            float(self._source.get(f"{stem}.{name}"))
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        return _softplus(positive), linear + _softplus(negative), linear, nearest

    def _experts(self, prefix: str, spec: Experts) -> ExpertWeights:
        names, router = self._names.layers, spec.router
        correction = shared_gate = factors = None
        if router.has_correction:
            name = f"{prefix}{names.correction}"
            is_row = self._source.has(name) and len(self._source.shape(name)) == 2
            shape = (1, spec.count) if is_row else (spec.count,)
            correction = self.floats(name, shape).flatten()
        if router.has_factors:
            factors = self.floats(f"{prefix}{names.factors}", (spec.count,))
        if spec.has_shared_gate:
            shared_gate = self.float_linear([f"{prefix}{names.shared_gate}"], (1, self.hidden_size))
        weights = ExpertWeights(
            router=self.float_linear(
                [f"{prefix}{names.router}"],
                (spec.count, self.hidden_size),
                has_bias=router.has_bias,
            ),
            correction=correction,
            experts=self._alike(
                tuple(
                    self._mlp(
                        prefix,
                        [expert_name(name, index) for name in names.expert_gate_up],
                        expert_name(names.expert_down, index),
                        spec.expert,
                        spec.latent_size,
                    )
                    for index in range(spec.count)
                )
            ),
            shared=None
            if spec.shared is None
            else self._mlp(prefix, names.shared_gate_up, names.shared_down, spec.shared),
            shared_gate=shared_gate,
            factors=factors,
            latents=None
            if spec.latent_size is None
            else self._expert_latents(prefix, spec.latent_size, has_bias=spec.has_latent_bias),
            norms=None if spec.own_norm is None else self._expert_norms(prefix, spec.own_norm),
        )
        return _together(weights) if self._target.provider == "triton" else weights

    def _expert_latents(self, prefix: str, size: int, *, has_bias: bool) -> ExpertLatents:
        names, hidden = self._names.layers, self.hidden_size
        return ExpertLatents(
            down=self.linear([f"{prefix}{names.latent_down}"], (size, hidden), has_bias=has_bias),
            up=self.linear([f"{prefix}{names.latent_up}"], (hidden, size), has_bias=has_bias),
        )

    def _alike(self, experts: tuple[MlpWeights, ...]) -> tuple[MlpWeights, ...]:
        """Experts in the format of all others, which the native library needs: if their formats
        differ, all are expanded."""
        if self._target.provider != "native":
            return experts
        products = ([one.gate_up.weight, one.down.weight] for one in experts)
        formats = {
            tuple(
                (rows.format, rows.order is None)
                for weight in both
                for rows in weight.native_rows()
            )
            for both in products
        }
        if len(formats) < 2:
            return experts
        return tuple(
            replace(one, gate_up=self._expanded(one.gate_up), down=self._expanded(one.down))
            for one in experts
        )

    def _expanded(self, linear: Linear) -> Linear:
        dense = DenseWeight(linear.weight.dense(self._target.dtype))
        self._num_expanded += dense.num_bytes
        return replace(linear, weight=dense)

    def _expert_norms(self, prefix: str, spec: Norm) -> ExpertNorms:
        names, size = self._names.layers, self._spec.hidden_size
        return ExpertNorms(
            router=self._norm(f"{prefix}{names.router_norm}", spec, size),
            before=self._norm(f"{prefix}{names.before_experts}", spec, size),
            after=self._norm(f"{prefix}{names.after_experts}", spec, size),
            after_shared=self._norm(f"{prefix}{names.after_shared}", spec, size),
        )

    def _norm(self, name: str, spec: Norm, size: int) -> NormWeights:
        weight = bias = None
        if spec.adds_one:
            weight = self.floats(f"{name}.weight", (size,)) + 1
        elif spec.has_weight:
            weight = self._vector([f"{name}.weight"], size)
        if spec.has_bias:
            bias = self._vector([f"{name}.bias"], size)
        return NormWeights(weight, bias)

    def _usable(self, weight: Weight) -> Weight:
        is_rehearsed = self._target.device.type == "meta"
        if is_rehearsed or self._target.provider in weight.providers:
            return weight
        expanded = DenseWeight(weight.dense(self._target.dtype))
        self._num_expanded += expanded.num_bytes
        return expanded

    def _vector(self, names: list[str], size: int) -> Tensor:
        return self._source.read(names, (size,), self._vector_dtype, self._target.device)


@dataclass(frozen=True, slots=True)
class _LayerTensors(LayerTensors):
    """The tensors of the layer whose names begin with ``prefix``."""

    reader: WeightReader
    prefix: str

    @property
    def names(self) -> LayerNames:
        return self.reader.layer_names

    @property
    def hidden_size(self) -> int:
        return self.reader.hidden_size

    def linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        return self.reader.linear(
            [f"{self.prefix}{name}" for name in names], shape, has_bias=has_bias
        )

    def float_linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        return self.reader.float_linear(
            [f"{self.prefix}{name}" for name in names], shape, has_bias=has_bias
        )

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.reader.floats(f"{self.prefix}{name}", shape)

    def stacked_floats(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        return self.reader.stacked_floats([f"{self.prefix}{name}" for name in names], shape)


def _together(weights: ExpertWeights) -> ExpertWeights:
    """The experts in one for each of their matrices, if there is a kernel for all of them."""
    experts = weights.experts
    gate_up = stacked([one.gate_up for one in experts])
    down = stacked([one.down for one in experts])
    if gate_up is None or down is None or any(one.constants for one in experts):
        return weights
    parts = zip(gate_up.parts(), down.parts(), strict=True)
    return replace(
        weights,
        experts=tuple(MlpWeights(*both) for both in parts),
        stacked=StackedMlps(gate_up, down),
    )


def _softplus(number: float) -> float:
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


def read_weights(reader: WeightReader) -> DecoderWeights:
    """Read everything. Raises `StartupError` as the reader does."""
    embedding = reader.embedding()
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(reader.layers()),
        norm=reader.norm(),
        lm_head=embedding if reader.is_tied else reader.lm_head(),
        dtype=reader.dtype,
        head_bias=reader.head_bias(),
        embedding_norm=reader.embedding_norm(),
        layer_inputs=reader.layer_inputs(),
    )
    reader.check_complete()
    return weights
