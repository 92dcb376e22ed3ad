"""The weights of a native decoder, with matrices fused as they are multiplied."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.config import DecoderConfig
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import DenseWeight, Weight

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; redundant with the configuration."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` is [outputs, inputs], ``bias`` [outputs]."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. The weights of norms are [hidden_size] or [head_dim]."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. ``embedding`` and ``lm_head`` are [vocab_size, hidden_size], the same object if
    tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Weight


class WeightReader:
    """Reads the weights of a checkpoint part by part, without keeping them.

    Raises `StartupError` if a tensor is missing, has the wrong shape or cannot be packed.
    """

    def __init__(
        self,
        source: TensorSource,
        config: DecoderConfig,
        stored_as: Format,
        target: Target,
        *,
        vector_dtype: torch.dtype | None = None,
    ) -> None:
        """Matrices without a kernel of the target's provider are expanded to its data type.

        ``vector_dtype`` is the type of norms and biases, by default the target's.
        """
        self._source = source
        self._config = config
        self._format = stored_as
        self._target = target
        self._vector_dtype = vector_dtype or target.dtype
        self._num_expanded = 0

    @cached_property
    def is_tied(self) -> bool:
        """Whether the embedding is also the output projection.

        As in transformers, it is not if another projection is stored. Models for embeddings, which
        need none, may have been saved without it.
        """
        if not self._source.has("lm_head.weight"):
            is_for_embeddings = (self._source.directory / "modules.json").exists()
            return self._config.has_tied_embeddings or is_for_embeddings
        return self._config.has_tied_embeddings and torch.equal(
            self._source.get("lm_head.weight"),
            self._source.get("model.embed_tokens.weight"),
        )

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""
        return self._table("model.embed_tokens.weight")

    def lm_head(self) -> Weight:
        """[vocab_size, hidden_size]; only if it is not tied."""
        return self._table("lm_head.weight")

    def layers(self) -> Iterator[LayerWeights]:
        """Read one layer after another."""
        return (self._layer(f"model.layers.{i}.") for i in range(self._config.num_layers))

    def norm(self) -> Tensor:
        return self._vector(["model.norm.weight"], self._config.hidden_size)

    def check_complete(self) -> None:
        """Raise `StartupError` if a tensor of the checkpoint was not used, which would silently
        change the model."""
        left = [name for name in self._source.unread if not _WITHOUT_EFFECT.fullmatch(name)]
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

    def _table(self, name: str) -> Weight:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._usable(self._format.read_table(self._source, name, shape, self._target))

    def _layer(self, layer: str) -> LayerWeights:
        config = self._config
        hidden = config.hidden_size
        attended = config.num_heads * config.head_dim
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        qkv_size = attended + 2 * config.num_kv_heads * config.head_dim
        return LayerWeights(
            input_norm=self._vector([f"{layer}input_layernorm.weight"], hidden),
            qkv=self._linear(
                [f"{attention}{name}" for name in ("q_proj", "k_proj", "v_proj")],
                (qkv_size, hidden),
                has_bias=config.has_qkv_bias,
            ),
            query_norm=self._head_norm(f"{attention}q_norm.weight"),
            key_norm=self._head_norm(f"{attention}k_norm.weight"),
            attention_output=self._linear(
                [f"{attention}o_proj"], (hidden, attended), has_bias=config.has_output_bias
            ),
            mlp_norm=self._vector([f"{layer}post_attention_layernorm.weight"], hidden),
            gate_up=self._linear(
                [f"{mlp}gate_proj", f"{mlp}up_proj"],
                (2 * config.intermediate_size, hidden),
                has_bias=config.has_mlp_bias,
            ),
            down=self._linear(
                [f"{mlp}down_proj"],
                (hidden, config.intermediate_size),
                has_bias=config.has_mlp_bias,
            ),
        )

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

    def _head_norm(self, name: str) -> Tensor | None:
        return self._vector([name], self._config.head_dim) if self._config.has_qk_norms else None

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
    )
    reader.check_complete()
    return weights
