"""The weights of a native decoder, with matrices fused as they are multiplied."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.quantized import Matrix, QuantFormat, QuantizedWeight, dequantize
from shared.errors import StartupError
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import DecoderConfig
from worker.model.weights.awq import AwqWeight
from worker.model.weights.matrices import matrix_reader

_WITHOUT_EFFECT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; redundant with the configuration."""


M_co = TypeVar("M_co", bound=Matrix | AwqWeight, covariant=True)
"""The type of a layer's matrices."""
T_co = TypeVar("T_co", bound=Matrix, covariant=True)
"""The type of embedding tables: Tensor after `DecoderWeights.dequantized`."""


@dataclass(frozen=True, slots=True)
class Linear(Generic[M_co]):
    """``weight`` is [outputs, inputs], ``bias`` [outputs]."""

    weight: M_co
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[M_co]):
    """One layer. The weights of norms are [hidden_size] or [head_dim]."""

    input_norm: Tensor
    qkv: Linear[M_co]
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear[M_co]
    mlp_norm: Tensor
    gate_up: Linear[M_co]
    down: Linear[M_co]


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[T_co]):
    """All weights. ``embedding`` and ``lm_head`` are [vocab_size, hidden_size], the same object if
    tied."""

    embedding: T_co
    layers: tuple[LayerWeights[T_co | AwqWeight], ...]
    norm: Tensor
    lm_head: T_co

    def dequantized(self, dtype: torch.dtype) -> "DecoderWeights[Tensor]":
        """All weights except AWQ matrices as plain tensors of one type."""
        embedding = _dense(self.embedding, dtype)
        is_tied = self.lm_head is self.embedding
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(_dense_layer(layer, dtype) for layer in self.layers),
            norm=self.norm.to(dtype),
            lm_head=embedding if is_tied else _dense(self.lm_head, dtype),
        )


class WeightReader:
    """Reads the weights of a checkpoint part by part, without keeping them.

    Raises `StartupError` if a tensor is missing, has the wrong shape or cannot be packed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        weight_format: torch.dtype | QuantFormat,
        device: torch.device,
        *,
        vector_dtype: torch.dtype | None = None,
        awq_stays: bool = False,
    ) -> None:
        """Matrices are read by `matrix_reader`.

        ``vector_dtype`` is the type of norms and biases; by default that of the matrices, or
        float32 if these are packed.
        """
        vectors = weight_format if isinstance(weight_format, torch.dtype) else torch.float32
        self._checkpoint = checkpoint
        self._config = config
        self._matrices = matrix_reader(
            checkpoint,
            config.head_dim,
            weight_format,
            device,
            is_awq=config.is_awq,
            awq_stays=awq_stays,
        )
        self._vector_dtype = vector_dtype or vectors
        self._device = device

    @cached_property
    def is_tied(self) -> bool:
        """Whether the embedding is also the output projection.

        As in transformers, it is not if another projection is stored. Models for embeddings, which
        need none, may have been saved without it.
        """
        if not self._checkpoint.has("lm_head.weight"):
            is_for_embeddings = (self._checkpoint.directory / "modules.json").exists()
            return self._config.has_tied_embeddings or is_for_embeddings
        return self._config.has_tied_embeddings and torch.equal(
            self._checkpoint.get("lm_head.weight"),
            self._checkpoint.get("model.embed_tokens.weight"),
        )

    def embedding(self) -> Matrix:
        """[vocab_size, hidden_size]."""
        return self._table("model.embed_tokens.weight")

    def lm_head(self) -> Matrix:
        """[vocab_size, hidden_size]; only if it is not tied."""
        return self._table("lm_head.weight")

    def layers(self) -> Iterator[LayerWeights[Matrix | AwqWeight]]:
        """Read one layer after another."""
        return (self._layer(f"model.layers.{i}.") for i in range(self._config.num_layers))

    def norm(self) -> Tensor:
        return self._vector(["model.norm.weight"], self._config.hidden_size)

    def check_complete(self) -> None:
        """Raise `StartupError` if a tensor of the checkpoint was not used, which would silently
        change the model."""
        left = [name for name in self._checkpoint.unread if not _WITHOUT_EFFECT.fullmatch(name)]
        if left:
            raise StartupError(
                f"{len(left)} tensors are not part of the model that config.json describes, e.g. "
                f"{left[0]}"
            )

    def _table(self, name: str) -> Matrix:
        return self._matrices.table(name, (self._config.vocab_size, self._config.hidden_size))

    def _layer(self, layer: str) -> LayerWeights[Matrix | AwqWeight]:
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

    def _linear(
        self, names: list[str], shape: tuple[int, int], *, has_bias: bool
    ) -> Linear[Matrix | AwqWeight]:
        return Linear(
            self._matrices.linear([f"{name}.weight" for name in names], shape),
            self._vector([f"{name}.bias" for name in names], shape[0]) if has_bias else None,
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self._vector([name], self._config.head_dim) if self._config.has_qk_norms else None

    def _vector(self, names: list[str], size: int) -> Tensor:
        return self._checkpoint.read(names, (size,), self._vector_dtype, self._device)


def read_weights(reader: WeightReader) -> DecoderWeights[Matrix]:
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


def _dense_layer(
    layer: LayerWeights[Matrix | AwqWeight], dtype: torch.dtype
) -> LayerWeights[Tensor | AwqWeight]:
    return LayerWeights(
        input_norm=layer.input_norm.to(dtype),
        qkv=_dense_linear(layer.qkv, dtype),
        query_norm=None if layer.query_norm is None else layer.query_norm.to(dtype),
        key_norm=None if layer.key_norm is None else layer.key_norm.to(dtype),
        attention_output=_dense_linear(layer.attention_output, dtype),
        mlp_norm=layer.mlp_norm.to(dtype),
        gate_up=_dense_linear(layer.gate_up, dtype),
        down=_dense_linear(layer.down, dtype),
    )


def _dense_linear(
    linear: Linear[Matrix | AwqWeight], dtype: torch.dtype
) -> Linear[Tensor | AwqWeight]:
    weight, bias = linear.weight, linear.bias
    return Linear(
        weight if isinstance(weight, AwqWeight) else _dense(weight, dtype),
        None if bias is None else bias.to(dtype),
    )


def _dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    dense = dequantize(matrix) if isinstance(matrix, QuantizedWeight) else matrix
    return dense.to(dtype)
