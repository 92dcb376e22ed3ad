"""The weights of a native decoder, with matrices fused as they are multiplied."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm
from worker.model.weights.derived import (
    Made,
    derived,
    expert_name,
    rotated_heads,
    single_experts,
    values_from_keys,
)
from worker.model.weights.formats.blocks import Quantized
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight, Weight

logger = logging.getLogger(__name__)

OF_FLOATS = (Dense.name, Quantized.name)
"""The formats that read a checkpoint of floats."""
_WITHOUT_EFFECT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; redundant with the configuration."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` is [outputs, inputs], ``bias`` [outputs]."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The vectors of a norm, each [width]. If one has been added to weights that are stored without
    it, they are float32."""

    weight: Tensor | None
    bias: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """``gate_up`` is only the first product if there is no gate."""

    gate_up: Linear
    down: Linear


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norms are None where the layer has none."""

    attention: AttentionWeights
    feed_forward: MlpWeights | ExpertWeights
    before_attention: NormWeights | None
    after_attention: NormWeights | None = None
    before_feed_forward: NormWeights | None
    after_feed_forward: NormWeights | None = None
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
        prefixes = self._names.prefixes
        self._prefix = next(
            (prefix for prefix in prefixes if source.has(f"{prefix}embed_tokens.weight")),
            prefixes[0],
        )
        self._source = derived(source, self._made())
        if self._source.is_changed and stored_as.name not in OF_FLOATS:
            # Their scales would have to be taken apart like the weights.
            raise StartupError(
                f"the checkpoint is packed as {stored_as.name}, which is not supported for a model "
                "whose heads or experts are stored in another form: use the original precision"
            )
        self._format = stored_as
        self._target = target
        self._vector_dtype = vector_dtype or target.dtype
        self._num_expanded = 0

    @property
    def dtype(self) -> torch.dtype:
        """The type to which floats are converted."""
        return self._target.dtype

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
            self._source.get(self._head), self._source.get(f"{self._prefix}embed_tokens.weight")
        )

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""
        return self._table(f"{self._prefix}embed_tokens.weight")

    def lm_head(self) -> Weight:
        """[vocab_size, hidden_size]; only if it is not tied."""
        return self._table(self._head or f"{self._names.heads[0]}.weight")

    def layers(self) -> Iterator[LayerWeights]:
        """Read one layer after another."""
        return (
            self._layer(self._layer_prefix(index), layer)
            for index, layer in enumerate(self._spec.layers)
        )

    def norm(self) -> NormWeights:
        name = f"{self._prefix}{self._names.final_norm}"
        return self._norm(name, self._spec.final_norm, self._spec.hidden_size)

    def check_complete(self) -> None:
        """Raise `StartupError` if a tensor of the checkpoint was not used, which would silently
        change the model."""
        left = [name for name in self._source.unread if not _WITHOUT_EFFECT.fullmatch(name)]
        if self._names.is_within:  # the other models of the checkpoint are not read
            left = [name for name in left if name.startswith(f"{self._prefix}layers.")]
        if self._names.has_further_layers:
            layers = tuple(self._layer_prefix(index) for index in range(self._spec.num_layers))
            further = f"{self._prefix}layers."
            left = [n for n in left if n.startswith(layers) or not n.startswith(further)]
        further_parts = tuple(f"{self._prefix}{part}" for part in self._names.further_parts)
        left = [name for name in left if not name.startswith(further_parts)]
        if left:
            raise StartupError(
                f"{len(left)} tensors are not part of the model that config.json describes, e.g. "
                f"{left[0]}"
            )
        if self._num_expanded:
            logger.warning(
                "the weights are expanded: these kernels cannot multiply their format",
                extra={"format": self._format.name, "bytes": self._num_expanded},
            )

    def rehearse(self) -> None:
        """Raise the `StartupError` that reading everything would raise for names and shapes. The
        source may have no data."""
        self.embedding()
        for _ in self.layers():
            pass
        self.norm()
        if self._head is not None or not self.is_tied:
            self.lm_head()
        self.check_complete()

    def _layer_prefix(self, index: int) -> str:
        return f"{self._prefix}layers.{index}."

    def _made(self) -> Iterator[Made]:
        """The tensors that are not stored as they are used."""
        names = self._names.layers
        for index, layer in enumerate(self._spec.layers):
            prefix = self._layer_prefix(index)
            yield rotated_heads(layer.attention, names, prefix)
            if layer.attention.values_are_keys:
                yield values_from_keys(names, prefix)
            part = layer.feed_forward
            if isinstance(part, Experts) and "{}" not in names.expert_down:
                yield single_experts(part, names, prefix)

    def _table(self, name: str) -> Weight:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._usable(self._format.read_table(self._source, name, shape, self._target))

    def _layer(self, prefix: str, layer: Layer) -> LayerWeights:
        names, part = self._names.layers, layer.feed_forward

        def norm(name: str, spec: Norm | None) -> NormWeights | None:
            size = self._spec.hidden_size
            return None if spec is None else self._norm(f"{prefix}{name}", spec, size)

        return LayerWeights(
            before_attention=norm(names.before_attention, layer.before_attention),
            attention=self._attention(prefix, layer.attention),
            feed_forward=self._experts(prefix, part)
            if isinstance(part, Experts)
            else self._mlp(prefix, names.gate_up, names.down, part),
            after_attention=norm(names.after_attention, layer.after_attention),
            before_feed_forward=norm(names.before_feed_forward, layer.before_feed_forward),
            after_feed_forward=norm(names.after_feed_forward, layer.after_feed_forward),
            scalar=float(self._source.get(f"{prefix}{names.scalar}")) if layer.has_scalar else 1.0,
        )

    def _attention(self, prefix: str, spec: Attention) -> AttentionWeights:
        names, hidden = self._names.layers, self._spec.hidden_size
        sinks = None
        if spec.has_sinks:
            shape = (spec.num_heads,)
            device = self._target.device
            sinks = self._source.read([f"{prefix}{names.sinks}"], shape, torch.float32, device)
        return AttentionWeights(
            qkv=self._linear(
                [f"{prefix}{name}" for name in names.qkv],
                (spec.qkv_size, hidden),
                has_bias=spec.has_qkv_bias,
            ),
            output=self._linear(
                [f"{prefix}{names.attention_output}"],
                (hidden, spec.attended_size),
                has_bias=spec.has_output_bias,
            ),
            query_norm=self._head_norm(f"{prefix}{names.query_norm}", spec, spec.num_heads),
            key_norm=self._head_norm(f"{prefix}{names.key_norm}", spec, spec.num_kv_heads),
            sinks=sinks,
        )

    def _head_norm(self, name: str, spec: Attention, num_heads: int) -> NormWeights | None:
        if spec.qk_norm is None:
            return None
        size = spec.head_dim * (1 if spec.qk_norm.over == "head" else num_heads)
        return self._norm(name, spec.qk_norm.norm, size)

    def _mlp(self, prefix: str, gate_up: Sequence[str], down: str, spec: Mlp) -> MlpWeights:
        hidden = self._spec.hidden_size
        return MlpWeights(
            gate_up=self._linear(
                [f"{prefix}{name}" for name in gate_up],
                (spec.size * (2 if spec.is_gated else 1), hidden),
                has_bias=spec.has_bias,
            ),
            down=self._linear([f"{prefix}{down}"], (hidden, spec.size), has_bias=spec.has_bias),
        )

    def _experts(self, prefix: str, spec: Experts) -> ExpertWeights:
        names, router = self._names.layers, spec.router
        correction = shared_gate = None
        if router.has_correction:
            name, device = f"{prefix}{names.correction}", self._target.device
            is_row = self._source.has(name) and len(self._source.shape(name)) == 2
            shape = (1, spec.count) if is_row else (spec.count,)
            correction = self._source.read([name], shape, torch.float32, device).flatten()
        if spec.has_shared_gate:
            shared_gate = self._floats(f"{prefix}{names.shared_gate}", 1, has_bias=False)
        return ExpertWeights(
            router=self._floats(f"{prefix}{names.router}", spec.count, has_bias=router.has_bias),
            correction=correction,
            experts=tuple(
                self._mlp(
                    prefix,
                    [expert_name(name, index) for name in names.expert_gate_up],
                    expert_name(names.expert_down, index),
                    spec.expert,
                )
                for index in range(spec.count)
            ),
            shared=None
            if spec.shared is None
            else self._mlp(prefix, names.shared_gate_up, names.shared_down, spec.shared),
            shared_gate=shared_gate,
        )

    def _floats(self, name: str, outputs: int, *, has_bias: bool) -> Linear:
        """A small matrix, which is never packed."""
        shape, device = (outputs, self._spec.hidden_size), self._target.device
        weight = self._source.read([f"{name}.weight"], shape, self._vector_dtype, device)
        bias = self._vector([f"{name}.bias"], outputs) if has_bias else None
        return Linear(DenseWeight(weight), bias)

    def _norm(self, name: str, spec: Norm, size: int) -> NormWeights:
        weight = bias = None
        if spec.adds_one:
            device = self._target.device
            weight = self._source.read([f"{name}.weight"], (size,), torch.float32, device) + 1
        elif spec.has_weight:
            weight = self._vector([f"{name}.weight"], size)
        if spec.has_bias:
            bias = self._vector([f"{name}.bias"], size)
        return NormWeights(weight, bias)

    def _linear(self, names: list[str], shape: tuple[int, int], *, has_bias: bool) -> Linear:
        stored = [f"{name}.weight" for name in names]
        return Linear(
            self._usable(self._format.read(self._source, stored, shape, self._target)),
            self._vector([f"{name}.bias" for name in names], shape[0]) if has_bias else None,
        )

    def _usable(self, weight: Weight) -> Weight:
        if self._target.provider in weight.providers:
            return weight
        expanded = DenseWeight(weight.dense(self._target.dtype))
        self._num_expanded += expanded.num_bytes
        return expanded

    def _vector(self, names: list[str], size: int) -> Tensor:
        return self._source.read(names, (size,), self._vector_dtype, self._target.device)


def read_weights(reader: WeightReader) -> DecoderWeights:
    """Read everything. Raises `StartupError` as the reader does."""
    embedding = reader.embedding()
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(reader.layers()),
        norm=reader.norm(),
        lm_head=embedding if reader.is_tied else reader.lm_head(),
        dtype=reader.dtype,
    )
    reader.check_complete()
    return weights
