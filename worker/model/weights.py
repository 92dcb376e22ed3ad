"""The weights of a native decoder, fused as it multiplies with them."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import StartupError
from worker.model.checkpoint import Checkpoint
from worker.model.config import DecoderConfig

_WITHOUT_EFFECT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; follows from the configuration."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` is [outputs, inputs], ``bias`` [outputs]."""

    weight: Tensor
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
    """``embedding`` and ``lm_head`` are [vocab_size, hidden_size], and the same where tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


def read_weights(
    checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Read every tensor of the checkpoint.

    Raises `StartupError` where one is missing, has the wrong shape or has no place in this model:
    one that is left out would change the model without a word.
    """
    weights = _Reader(checkpoint, config, dtype, device).read()
    left = [name for name in checkpoint.unread if not _WITHOUT_EFFECT.fullmatch(name)]
    if left:
        raise StartupError(f"{len(left)} tensors have no place in the model, {left[0]} first")
    return weights


class _Reader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device

    def read(self) -> DecoderWeights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding = self._stack(["model.embed_tokens.weight"], *table)
        if config.has_tied_embeddings:
            self._checkpoint.skip("lm_head.weight")
            lm_head = embedding
        else:
            lm_head = self._stack(["lm_head.weight"], *table)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(config.num_layers))
        norm = self._stack(["model.norm.weight"], config.hidden_size)
        return DecoderWeights(embedding, layers, norm, lm_head)

    def _layer(self, layer: str) -> LayerWeights:
        config = self._config
        hidden = config.hidden_size
        attended = config.num_heads * config.head_dim
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        qkv_size = attended + 2 * config.num_kv_heads * config.head_dim
        return LayerWeights(
            input_norm=self._stack([f"{layer}input_layernorm.weight"], hidden),
            qkv=self._linear(attention, ("q_proj", "k_proj", "v_proj"), qkv_size, hidden),
            query_norm=self._optional([f"{attention}q_norm.weight"], config.head_dim),
            key_norm=self._optional([f"{attention}k_norm.weight"], config.head_dim),
            attention_output=self._linear(attention, ("o_proj",), hidden, attended),
            mlp_norm=self._stack([f"{layer}post_attention_layernorm.weight"], hidden),
            gate_up=self._linear(
                mlp, ("gate_proj", "up_proj"), 2 * config.intermediate_size, hidden
            ),
            down=self._linear(mlp, ("down_proj",), hidden, config.intermediate_size),
        )

    def _linear(self, module: str, names: tuple[str, ...], outputs: int, inputs: int) -> Linear:
        weight = self._stack([f"{module}{name}.weight" for name in names], outputs, inputs)
        return Linear(weight, self._optional([f"{module}{name}.bias" for name in names], outputs))

    def _optional(self, names: list[str], *shape: int) -> Tensor | None:
        """Whether a family has these shows in the checkpoint."""
        return self._stack(names, *shape) if self._checkpoint.has(names[0]) else None

    def _stack(self, names: list[str], *shape: int) -> Tensor:
        return self._checkpoint.read(names, shape, self._dtype, self._device)
