"""One decoder for Llama, SmolLM, Mistral, Qwen2 and Qwen3, written against the ops."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.providers import Ops, Provider
from worker.model.config import DecoderConfig
from worker.model.decoders.attention import attend
from worker.model.decoders.rope_table import rope_table
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.weights.layers import DecoderWeights, LayerWeights, Linear


class LlamaFamily(Decoder):
    """The sizes that both decoders of the family take from their configuration."""

    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        """``max_seq_len`` is the maximum context length that will be used.

        Raises `StartupError` if the rotary scaling is not supported.
        """
        self._config = config
        self._rope_table = rope_table(config.rope, config.head_dim, max_seq_len)

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._config.head_dim

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._rope_table.shape[0]


class NativeDecoder(LlamaFamily):
    """A `Decoder` of the Llama family.

    The families differ only in weights and configuration: biases, norms of queries and keys,
    sliding windows, tied embeddings, and the scaling of rotary positions.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, max_seq_len: int
    ) -> None:
        super().__init__(config, max_seq_len)
        self._weights = weights
        self._embedding = weights.embedding.dense(weights.norm.dtype)
        self._lm_head = weights.lm_head.dense(weights.norm.dtype)
        self._ops = ops
        self._rope_table = self._rope_table.to(self.device)

    @property
    def traits(self) -> Traits:
        return Traits(
            numerics="native",
            can_record=self._ops.provider == "triton",
            hidden_size=self._config.hidden_size,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def provider(self) -> Provider:
        return self._ops.provider

    def without_head(self) -> "NativeDecoder":
        """See `Decoder.without_head`."""
        ops = replace(self._ops, logits=lambda hidden, weight: hidden.float())
        return NativeDecoder(self._config, self._weights, ops, self.max_seq_len)

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        ops, weights, eps = self._ops, self._weights, self._config.rms_norm_eps
        residual = functional.embedding(inputs.token_ids, self._embedding)
        hidden = torch.zeros_like(residual)  # so that the first layer is not a special case
        for index, layer in enumerate(weights.layers):
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(index, layer, hidden, inputs, kv_cache)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._linear(ops.silu_mul(self._linear(hidden, layer.gate_up)), layer.down)
        rows = inputs.sampled_rows
        hidden, _ = ops.add_rms_norm(hidden[rows], residual[rows], weights.norm, eps)
        return ops.logits(hidden, self._lm_head)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        inputs: ForwardInputs,
        kv_cache: KVCache,
    ) -> Tensor:
        config, ops = self._config, self._ops
        heads = self._linear(hidden, layer.qkv).view(hidden.shape[0], -1, config.head_dim)
        num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(heads, num_heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, layer.key_norm, config.rms_norm_eps)
        query = ops.rope_store_kv(
            query,
            key,
            value,
            inputs.positions,
            self._rope_table,
            *kv_cache.layer(index),
            inputs.slots,
        )
        attended = attend(
            ops,
            inputs,
            kv_cache,
            index,
            query,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[index],
        )
        return self._linear(attended.flatten(1), layer.attention_output)

    def _linear(self, hidden: Tensor, linear: Linear) -> Tensor:
        return linear.weight.linear(hidden, linear.bias, self._ops)
