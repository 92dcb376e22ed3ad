"""Runs any `ModelSpec` on the operations: the reference on all devices, and Triton on GPUs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention_spec import AttentionSpec
from kernels.providers import Ops, Provider
from kernels.reference.rope import rope
from worker.model.cache_layout import CacheLayout, layout_of_spec
from worker.model.decoders.attention import attend
from worker.model.decoders.positions import PositionTables
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm
from worker.model.weights.layers import (
    AttentionWeights,
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    NormWeights,
)

_TRITON_HEAD_DIM = 256


class SpecDecoder(Decoder):
    """The sizes that decoders take from their spec."""

    def __init__(self, spec: ModelSpec, max_seq_len: int) -> None:
        """``max_seq_len`` is the maximum context length that will be used."""
        self._spec = spec
        self._max_seq_len = max_seq_len

    @property
    def num_layers(self) -> int:
        return self._spec.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._spec.head_dim

    def cache_layout(self) -> CacheLayout:
        """See `Decoder.cache_layout`."""
        return layout_of_spec(self._spec, self._max_seq_len, self.provider)

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._max_seq_len


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share."""

    inputs: ForwardInputs
    kv_cache: KVCache


class StackDecoder(SpecDecoder):
    """A `Decoder` of any spec. Families differ only in their specs and weights."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, ops: Ops, max_seq_len: int
    ) -> None:
        """Raises `StartupError` if the rotary scaling is not supported."""
        super().__init__(spec, max_seq_len)
        self._weights = weights
        self._dtype = weights.dtype
        self._embedding = weights.embedding.dense(self._dtype)
        self._lm_head = weights.lm_head.dense(self._dtype)
        self._ops = ops
        tables = PositionTables(max_seq_len, self.device)
        self._angles = [tables.angles(layer.attention) for layer in spec.layers]
        self._temperatures = [tables.temperatures(layer.attention) for layer in spec.layers]
        self._rules = [
            attention_spec(layer.attention, part.attention)
            for layer, part in zip(spec.layers, weights.layers, strict=True)
        ]
        # As in transformers, the factor is rounded to the type of the embedding.
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self._dtype).item()

    @property
    def traits(self) -> Traits:
        return Traits(
            numerics="native",
            can_record=self._ops.provider == "triton" and has_own_kernels(self._spec),
            hidden_size=self._spec.hidden_size,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def provider(self) -> Provider:
        return self._ops.provider

    def without_head(self) -> "StackDecoder":
        """See `Decoder.without_head`."""
        ops = replace(self._ops, logits=lambda hidden, weight: hidden.float())
        spec = replace(self._spec, logit_scale=1.0, logit_softcap=None)
        return StackDecoder(spec, self._weights, ops, self.max_seq_len)

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        step, spec = _Step(inputs, kv_cache), self._spec
        residual = functional.embedding(inputs.token_ids, self._embedding)
        if spec.embedding_scale != 1:
            residual = residual * self._embedding_scale
        branch = torch.zeros_like(residual)  # so that the first layer is not a special case
        for index, layer in enumerate(spec.layers):
            branch, residual = self._layer(index, layer, branch, residual, step)
        rows = inputs.sampled_rows
        weights = self._weights
        hidden, _ = self._add_norm(branch[rows], residual[rows], spec.final_norm, weights.norm)
        logits = self._ops.logits(hidden, self._lm_head)
        if spec.logit_scale != 1:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits

    def _layer(
        self, index: int, layer: Layer, branch: Tensor, residual: Tensor, step: _Step
    ) -> tuple[Tensor, Tensor]:
        """The layer's last part, not yet added, and everything before it."""
        weights = self._weights.layers[index]
        hidden, residual = self._add_norm(
            branch, residual, layer.before_attention, weights.before_attention
        )
        # An operation may write over its input, which the second part has, too.
        same = hidden.clone() if layer.is_parallel else hidden
        attended = self._attention(index, layer.attention, weights.attention, same, step)
        attended = self._after(attended, layer, layer.after_attention, weights.after_attention)
        if layer.is_parallel:
            residual = residual + attended
        else:
            hidden, residual = self._add_norm(
                attended, residual, layer.before_feed_forward, weights.before_feed_forward
            )
        branch = self._feed_forward(layer, weights, hidden)
        branch = self._after(branch, layer, layer.after_feed_forward, weights.after_feed_forward)
        if weights.scalar != 1:
            residual = (residual + branch) * weights.scalar
            branch = torch.zeros_like(residual)
        return branch, residual

    def _after(
        self, branch: Tensor, layer: Layer, norm: Norm | None, weights: NormWeights | None
    ) -> Tensor:
        if norm is not None and weights is not None:
            branch = self._norm(branch, norm, weights)
        return branch if layer.multiplier == 1 else branch * layer.multiplier

    def _attention(
        self,
        index: int,
        spec: Attention,
        weights: AttentionWeights,
        hidden: Tensor,
        step: _Step,
    ) -> Tensor:
        inputs, ops = step.inputs, self._ops
        heads = self._linear(hidden, weights.qkv).view(hidden.shape[0], -1, spec.head_dim)
        num_heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, key, value = torch.split(heads, num_heads, dim=1)
        qk_norm = spec.qk_norm
        if qk_norm is not None and not qk_norm.is_after_rope:
            query = self._norm_heads(query, spec, weights.query_norm)
            key = self._norm_heads(key, spec, weights.key_norm)
        if spec.value_norm is not None:
            value = self._norm(value, spec.value_norm, NormWeights(None))
        table = self._angles[index]
        cache = step.kv_cache.layer(index, spec.num_kv_heads, spec.head_dim)
        group = step.kv_cache.group(index)
        if qk_norm is not None and qk_norm.is_after_rope:
            query, key = rope(query, key, inputs.positions, table)
            query = self._norm_heads(query, spec, weights.query_norm)
            key = self._norm_heads(key, spec, weights.key_norm)
            ops.store_kv(key, value.contiguous(), *cache, inputs.slots[group])
        else:
            query = ops.rope_store_kv(
                query, key, value, inputs.positions, table, *cache, inputs.slots[group]
            )
        temperatures = self._temperatures[index]
        if temperatures is not None:
            factors = temperatures[inputs.positions]
            query = (query * factors[:, None, None]).to(query.dtype)
        attended = attend(ops, inputs, group, cache, query, self._rules[index])
        return self._linear(attended.flatten(1), weights.output)

    def _norm_heads(self, heads: Tensor, spec: Attention, weights: NormWeights | None) -> Tensor:
        assert spec.qk_norm is not None
        assert weights is not None
        if spec.qk_norm.over == "head":
            return self._norm(heads, spec.qk_norm.norm, weights)
        return self._norm(heads.flatten(1), spec.qk_norm.norm, weights).view(heads.shape)

    def _feed_forward(self, layer: Layer, weights: LayerWeights, hidden: Tensor) -> Tensor:
        spec, part = layer.feed_forward, weights.feed_forward
        if isinstance(spec, Experts):
            assert isinstance(part, ExpertWeights)
            return self._experts(spec, part, hidden)
        assert isinstance(part, MlpWeights)
        return self._mlp(spec, part, hidden)

    def _mlp(self, spec: Mlp, weights: MlpWeights, hidden: Tensor) -> Tensor:
        inner = self._linear(hidden, weights.gate_up)
        if spec.activation == "silu" and spec.is_gated:
            inner = self._ops.silu_mul(inner)
        else:
            inner = self._ops.activate(inner, spec.activation, is_gated=spec.is_gated)
        return self._linear(inner, weights.down)

    def _experts(self, spec: Experts, weights: ExpertWeights, hidden: Tensor) -> Tensor:
        """Each expert computes its tokens, whose results are added in the order of the choice."""
        router = spec.router
        logits = self._linear(hidden, weights.router)
        chosen, shares = self._ops.choose_experts(logits, router, weights.correction)
        shape = (*chosen.shape, hidden.shape[1])
        computed = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            share = shares[rows, places].unsqueeze(1)
            inputs = hidden[rows]
            if router.weighs_inputs:
                inputs, share = (inputs * share).to(hidden.dtype), torch.ones_like(share)
            outputs = self._mlp(spec.expert, weights.experts[expert], inputs)
            computed[rows, places] = (outputs * share).to(hidden.dtype)
        total = computed.sum(dim=1)
        if spec.shared is None or weights.shared is None:
            return total
        shared = self._mlp(spec.shared, weights.shared, hidden)
        if weights.shared_gate is not None:
            shared = shared * torch.sigmoid(self._linear(hidden, weights.shared_gate))
        return total + shared

    def _add_norm(
        self, branch: Tensor, residual: Tensor, norm: Norm | None, weights: NormWeights | None
    ) -> tuple[Tensor, Tensor]:
        """The sum, normalized if there is a norm, and the sum."""
        if norm is None or weights is None:
            total = branch + residual
            return total, total
        if _is_plain(norm, weights, branch.dtype) and weights.weight is not None:
            return self._ops.add_rms_norm(branch, residual, weights.weight, norm.eps)
        total = branch + residual
        return self._norm(total, norm, weights), total

    def _norm(self, hidden: Tensor, norm: Norm, weights: NormWeights) -> Tensor:
        if _is_plain(norm, weights, hidden.dtype) and weights.weight is not None:
            return self._ops.rms_norm(hidden, weights.weight, norm.eps)
        wide, shape = hidden.float(), hidden.shape[-1:]
        weight = None if weights.weight is None else weights.weight.float()
        bias = None if weights.bias is None else weights.bias.float()
        if norm.kind == "layer":
            return functional.layer_norm(wide, shape, weight, bias, norm.eps).to(hidden.dtype)
        return functional.rms_norm(wide, shape, weight, norm.eps).to(hidden.dtype)

    def _linear(self, hidden: Tensor, linear: Linear) -> Tensor:
        return linear.weight.linear(hidden, linear.bias, self._ops)


def attention_spec(spec: Attention, weights: AttentionWeights) -> AttentionSpec:
    """What the kernels have to know of a layer's attention."""
    return AttentionSpec(
        scale=spec.scale,
        window=spec.window,
        chunk=spec.chunk,
        softcap=spec.softcap,
        sinks=weights.sinks,
    )


def has_own_kernels(spec: ModelSpec) -> bool:
    """Whether no operation of the model falls back from Triton to the reference, which waits for
    the device."""
    return not any(
        isinstance(layer.feed_forward, Experts)
        or layer.attention.chunk is not None
        or layer.attention.softcap is not None
        or layer.attention.has_sinks
        or layer.attention.head_dim > _TRITON_HEAD_DIM
        for layer in spec.layers
    )


def _is_plain(norm: Norm, weights: NormWeights, dtype: torch.dtype) -> bool:
    """Whether the kernels know the norm."""
    has_dtype = weights.weight is not None and weights.weight.dtype == dtype
    return norm.kind == "rms" and has_dtype and weights.bias is None
