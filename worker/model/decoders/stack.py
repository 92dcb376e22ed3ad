"""Runs any `ModelSpec` on the operations: the reference on all devices, and Triton on GPUs."""

from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation_spec import ActivationSpec
from kernels.attention_spec import AttentionSpec
from kernels.planes import Planes
from kernels.providers import Ops, Provider
from kernels.reference.rope import rope
from worker.model.cache_layout import CacheLayout, layout_of_spec
from worker.model.decoders.attention import attend
from worker.model.decoders.positions import PositionTables
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.numerics import PLANES
from worker.model.spec import (
    Attention,
    Experts,
    Latent,
    Layer,
    LayerInputs,
    Mlp,
    ModelSpec,
    Norm,
    Recurrence,
)
from worker.model.weights.layers import (
    AttentionWeights,
    DecoderWeights,
    ExpertWeights,
    LayerInputWeights,
    LayerWeights,
    MlpWeights,
    NormWeights,
)
from worker.model.weights.recurrences.interface import Recurrent
from worker.model.weights.stacked import StackedMlps
from worker.model.weights.weight import DenseWeight, Linear


class SpecDecoder(Decoder):
    """The sizes that decoders take from their spec."""

    def __init__(self, spec: ModelSpec, max_seq_len: int, cache_dtype: torch.dtype | None) -> None:
        """``max_seq_len`` is the maximum context length that will be used; ``cache_dtype`` the type
        of keys and values, by default that of activations."""
        self._spec = spec
        self._max_seq_len = max_seq_len
        self._cache_dtype = cache_dtype

    @property
    def num_layers(self) -> int:
        return self._spec.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._spec.head_dim

    def cache_layout(self, block_size: int) -> CacheLayout:
        """See `Decoder.cache_layout`."""
        return layout_of_spec(
            self._spec, self._max_seq_len, self.provider, block_size, self.cache_dtype
        )

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._max_seq_len

    @property
    def cache_dtype(self) -> torch.dtype:
        """See `Decoder.cache_dtype`."""
        return self._cache_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share."""

    inputs: ForwardInputs
    kv_cache: KVCache
    layer_inputs: Tensor | None
    """[num_tokens, num_layers, size]; see `LayerInputs`."""

    def states(self, layer: int, size: int, ops: Ops) -> Tensor:
        """The states of a layer before the step, float32 [num_seqs, size]; zeros at the start of a
        sequence."""
        inputs, cache = self.inputs, self.kv_cache
        return ops.read_states(
            cache.keys,
            cache.values,
            inputs.block_tables[-1, :, : self._num_state_blocks],
            inputs.query_starts,
            inputs.context_lens,
            first=cache.first_piece(layer),
            size=size,
        )

    def keep_states(self, layer: int, states: Tensor, ops: Ops) -> None:
        """Write the states of a layer after the step."""
        num_blocks, cache = self._num_state_blocks, self.kv_cache
        blocks = self.inputs.block_tables[-1, :, num_blocks : 2 * num_blocks]
        ops.write_states(
            states,
            cache.keys,
            cache.values,
            blocks,
            self.inputs.context_lens,
            first=cache.first_piece(layer),
        )

    @property
    def _num_state_blocks(self) -> int:
        group = self.kv_cache.layout.state
        assert group is not None, "the cache has no states"
        return group.num_blocks


@dataclass(frozen=True, slots=True)
class _AttentionParts:
    """The attention of a layer."""

    spec: Attention
    weights: AttentionWeights
    angles: Tensor
    temperatures: Tensor | None
    rule: AttentionSpec


class StackDecoder(SpecDecoder):
    """A `Decoder` of any spec. Families differ only in their specs and weights."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: Ops,
        max_seq_len: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises `StartupError` if the rotary scaling is not supported."""
        super().__init__(spec, max_seq_len, cache_dtype)
        self._dtype = weights.dtype
        self._embedding = weights.embedding.dense(self._dtype)
        is_tied = weights.lm_head is weights.embedding
        self._lm_head = self._embedding if is_tied else weights.lm_head.dense(self._dtype)
        # Packed tables are not kept beside the floats.
        self._weights = replace(
            weights, embedding=DenseWeight(self._embedding), lm_head=DenseWeight(self._lm_head)
        )
        self._has_planes = _has_planes(self._weights)
        self._ops = ops
        tables = PositionTables(max_seq_len, self.device)
        self._attentions = [
            None
            if layer.attention is None or part.attention is None
            else _AttentionParts(
                layer.attention,
                part.attention,
                tables.angles(layer.attention),
                tables.temperatures(layer.attention),
                attention_spec(layer.attention, part.attention, tables),
            )
            for layer, part in zip(spec.layers, weights.layers, strict=True)
        ]
        # As in transformers, the factor is rounded to the type of the embedding.
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self._dtype).item()

    @property
    def traits(self) -> Traits:
        return Traits(
            numerics=f"native {PLANES}" if self._has_planes else "native",
            can_record=self.has_own_kernels,
            # An embedder has no cache for states.
            hidden_size=None if self._spec.has_states else self._spec.hidden_size,
        )

    @property
    def has_own_kernels(self) -> bool:
        """Whether no operation falls back from Triton to the reference, which waits for the
        device."""
        are_stacked = (
            layer.feed_forward.stacked is not None
            for layer in self._weights.layers
            if isinstance(layer.feed_forward, ExpertWeights)
        )
        return self.provider == "triton" and all(are_stacked)

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
        ops = self._ops.replace(logits=lambda hidden, weight: hidden.float())
        spec = replace(self._spec, logit_scale=1.0, logit_softcap=None)
        weights = replace(self._weights, head_bias=None)
        return StackDecoder(spec, weights, ops, self.max_seq_len)

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        spec = self._spec
        residual = functional.embedding(inputs.token_ids, self._embedding)
        if spec.embedding_scale != 1:
            residual = residual * self._embedding_scale
        if spec.embedding_norm is not None and self._weights.embedding_norm is not None:
            residual = self._norm(residual, spec.embedding_norm, self._weights.embedding_norm)
        step = _Step(inputs, kv_cache, self._layer_inputs(inputs.token_ids, residual))
        branch = torch.zeros_like(residual)  # so that the first layer is not a special case
        for index, layer in enumerate(spec.layers):
            branch, residual = self._layer(index, layer, branch, residual, step)
        rows = inputs.sampled_rows
        weights = self._weights
        hidden, _ = self._add_norm(branch[rows], residual[rows], spec.final_norm, weights.norm)
        logits = self._ops.logits(hidden, self._lm_head)
        if weights.head_bias is not None:
            logits = logits + weights.head_bias
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
        hidden = branch
        if layer.has_mixer:
            hidden, residual = self._add_norm(
                branch, residual, layer.before_attention, weights.before_attention
            )
            # An operation may write over its input, which the second part has, too.
            same = hidden.clone() if layer.is_parallel else hidden
            branch = self._mixed(index, layer, same, step)
        if layer.feed_forward is not None:
            if layer.is_parallel:
                residual = residual + branch
            else:
                hidden, residual = self._add_norm(
                    branch, residual, layer.before_feed_forward, weights.before_feed_forward
                )
            branch = self._feed_forward(layer.feed_forward, weights, hidden, residual)
            branch = self._after(
                branch,
                layer.after_feed_forward,
                weights.after_feed_forward,
                layer.multipliers.feed_forward,
            )
        inputs = self._spec.layer_inputs
        if inputs is not None and weights.input is not None and step.layer_inputs is not None:
            residual = residual + branch
            branch = self._expanded_input(
                inputs, weights.input, residual, step.layer_inputs[:, index]
            )
        if weights.scalar != 1:
            residual = (residual + branch) * weights.scalar
            branch = torch.zeros_like(residual)
        return branch, residual

    def _layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """The inputs of all layers, [num_tokens, num_layers, size]."""
        spec, weights = self._spec.layer_inputs, self._weights.layer_inputs
        if spec is None or weights is None:
            return None
        shape = (len(token_ids), self._spec.num_layers, spec.size)
        projected = self._linear(embedded, weights.projection) * self._spec.hidden_size**-0.5
        projected = self._norm(projected.view(shape), spec.norm, weights.norm)
        scale = torch.tensor(spec.size**0.5).to(self._dtype)  # rounded like the embedding's
        stored = weights.table.rows(token_ids).to(self._dtype).view(shape) * scale.item()
        return (projected + stored) * 2**-0.5

    def _expanded_input(
        self, spec: LayerInputs, weights: LayerInputWeights, total: Tensor, own: Tensor
    ) -> Tensor:
        """What a layer's input ``own``, [num_tokens, size], adds to its result."""
        gate = self._linear(total, weights.gate)
        activation = ActivationSpec(name=spec.activation, is_gated=True)
        gated = self._ops.activate(torch.cat((gate, own), dim=1), activation)
        return self._norm(self._linear(gated, weights.expansion), spec.norm, weights.norm)

    def _after(
        self, branch: Tensor, norm: Norm | None, weights: NormWeights | None, multiplier: float
    ) -> Tensor:
        if norm is not None and weights is not None:
            branch = self._norm(branch, norm, weights)
        return branch if multiplier == 1 else branch * multiplier

    def _mixed(self, index: int, layer: Layer, hidden: Tensor, step: _Step) -> Tensor:
        """The mix of each token with the tokens before it: the result of attention, or of a
        recurrence, or their sum."""
        weights, parts = self._weights.layers[index], self._attentions[index]
        norm = layer.after_attention, weights.after_attention
        mixed: list[Tensor] = []
        if layer.recurrence is not None and weights.recurrence is not None:
            same = hidden if parts is None else hidden.clone()
            result = self._recurrence(index, layer.recurrence, weights.recurrence, same, step)
            mixed.append(self._after(result, *norm, layer.multipliers.recurrence))
        if parts is not None:
            latent = parts.spec.latent
            attended = (
                self._attention(index, parts, hidden, step)
                if latent is None
                else self._latent_attention(index, parts, latent, hidden, step)
            )
            mixed.append(self._after(attended, *norm, layer.multipliers.attention))
        return mixed[0] if len(mixed) == 1 else mixed[0] + mixed[1]

    def _recurrence(
        self, index: int, spec: Recurrence, weights: Recurrent, hidden: Tensor, step: _Step
    ) -> Tensor:
        states = step.states(index, spec.state_size, self._ops)
        mixed, states = weights.mix(hidden, states, step.inputs.query_starts, self._ops)
        step.keep_states(index, states, self._ops)
        return mixed

    def _attention(self, index: int, parts: _AttentionParts, hidden: Tensor, step: _Step) -> Tensor:
        spec, weights = parts.spec, parts.weights
        inputs, ops = step.inputs, self._ops
        source = self._spec.kv_layer(index)
        group = step.kv_cache.group(source)
        cache = step.kv_cache.layer(source, spec.num_kv_heads, spec.head_dim)
        heads = self._linear(hidden, weights.qkv).view(hidden.shape[0], -1, spec.head_dim)
        if spec.kv_from is not None:
            query = self._shared_query(parts, heads, inputs.positions)
            attended = attend(ops, inputs, group, cache, query, parts.rule)
            return self._linear(attended.flatten(1), weights.output)
        num_gates = spec.num_heads if spec.has_gate else 0
        num_heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, num_gates]
        query, key, value, gate = torch.split(heads, num_heads, dim=1)
        qk_norm = spec.qk_norm
        if qk_norm is not None and not qk_norm.is_after_rope:
            query = self._norm_heads(query, spec, weights.query_norm)
            key = self._norm_heads(key, spec, weights.key_norm)
        if spec.value_norm is not None:
            value = self._norm(value, spec.value_norm, NormWeights(None))
        table = parts.angles
        if qk_norm is not None and qk_norm.is_after_rope:
            query, key = rope(query, key, inputs.positions, table)
            query = self._norm_heads(query, spec, weights.query_norm)
            key = self._norm_heads(key, spec, weights.key_norm)
            ops.store_kv(key, value.contiguous(), *cache, inputs.slots[group])
        else:
            query = ops.rope_store_kv(
                query, key, value, inputs.positions, table, *cache, inputs.slots[group]
            )
        if parts.temperatures is not None:
            factors = parts.temperatures[inputs.positions]
            query = (query * factors[:, None, None]).to(query.dtype)
        attended = attend(ops, inputs, group, cache, query, parts.rule)
        if spec.has_gate:
            attended = attended * torch.sigmoid(gate)
        return self._linear(attended.flatten(1), weights.output)

    def _shared_query(self, parts: _AttentionParts, query: Tensor, positions: Tensor) -> Tensor:
        """The rotated queries of a layer that reads another layer's keys and values."""
        if parts.spec.qk_norm is not None:
            query = self._norm_heads(query, parts.spec, parts.weights.query_norm)
        rotated, _ = rope(query, query[:, :0], positions, parts.angles)
        return rotated

    def _latent_attention(
        self, index: int, parts: _AttentionParts, latent: Latent, hidden: Tensor, step: _Step
    ) -> Tensor:
        """Attention with one key head, whose keys, the latent vectors, are the values, too."""
        spec, weights, matrices = parts.spec, parts.weights, parts.weights.latent
        inputs, ops = step.inputs, self._ops
        assert matrices is not None
        assert weights.key_norm is not None
        made = self._linear(hidden, weights.qkv)
        sizes = [spec.qkv_size - spec.head_dim, latent.rank, spec.rotated_dim]
        query, vector, rotary = (part.contiguous() for part in torch.split(made, sizes, dim=1))
        if matrices.query_up is not None and weights.query_norm is not None:
            query = self._norm(query, latent.norm, weights.query_norm)
            query = self._linear(query, matrices.query_up)
        heads = query.view(len(hidden), spec.num_heads, -1)
        plain, rotated = torch.split(heads, [latent.key_dim, spec.rotated_dim], dim=2)
        vector = self._norm(vector, latent.norm, weights.key_norm)
        rotated, rotary = rope(rotated, rotary.unsqueeze(1), inputs.positions, parts.angles)
        key = torch.cat((vector.unsqueeze(1), rotary), dim=2)
        groups = _groups_of_heads(len(hidden), spec.num_heads, hidden.device)
        absorbed = self._product_of_heads(plain, matrices.absorb, *groups)
        absorbed = torch.cat((absorbed, rotated), dim=2)
        if parts.temperatures is not None:
            factors = parts.temperatures[inputs.positions]
            absorbed = (absorbed * factors[:, None, None]).to(absorbed.dtype)
        keys, _ = step.kv_cache.layer(index, spec.num_kv_heads, spec.head_dim)
        group = step.kv_cache.group(index)
        ops.store_kv(key, key, keys, keys, inputs.slots[group])
        attended = attend(ops, inputs, group, (keys, keys), absorbed, parts.rule)
        values = self._product_of_heads(attended, matrices.expand, *groups)
        return self._linear(values.flatten(1), weights.output)

    def _product_of_heads(
        self, heads: Tensor, linear: Linear, order: Tensor, starts: Tensor
    ) -> Tensor:
        """[num_tokens, num_heads, outputs of a head]. The results of torch's batched products may
        depend on the number of tokens."""
        num_tokens, num_heads, inputs = heads.shape
        matrices = linear.weight.dense(self._dtype).view(num_heads, -1, inputs)
        rows = heads.reshape(-1, inputs)
        products = self._ops.grouped_projection(rows, matrices, None, order, starts)
        return products.view(num_tokens, num_heads, -1)

    def _norm_heads(self, heads: Tensor, spec: Attention, weights: NormWeights | None) -> Tensor:
        assert spec.qk_norm is not None
        assert weights is not None
        if spec.qk_norm.over == "head":
            return self._norm(heads, spec.qk_norm.norm, weights)
        return self._norm(heads.flatten(1), spec.qk_norm.norm, weights).view(heads.shape)

    def _feed_forward(
        self, spec: Mlp | Experts, weights: LayerWeights, hidden: Tensor, residual: Tensor
    ) -> Tensor:
        """``residual`` is what ``hidden`` is the norm of."""
        part = weights.feed_forward
        if isinstance(spec, Experts):
            assert isinstance(part, ExpertWeights)
            return self._experts(spec, part, hidden, residual)
        assert isinstance(part, MlpWeights)
        return self._mlp(spec, part, hidden)

    def _mlp(self, spec: Mlp, weights: MlpWeights, hidden: Tensor) -> Tensor:
        inner = self._linear(hidden, weights.gate_up)
        return self._linear(self._activated(spec, inner, weights.constants), weights.down)

    def _activated(self, spec: Mlp, inner: Tensor, constants: tuple[float, ...] = ()) -> Tensor:
        """What the second product reads; may overwrite ``inner``, the result of the first."""
        if spec.gate_multiplier != 1:
            inner[:, : spec.size] *= spec.gate_multiplier
        if spec.activation == "silu" and spec.is_gated:
            return self._ops.silu_mul(inner)
        activation = ActivationSpec(
            name=spec.activation, is_gated=spec.is_gated, constants=constants
        )
        return self._ops.activate(inner, activation)

    def _experts(
        self, spec: Experts, weights: ExpertWeights, hidden: Tensor, residual: Tensor
    ) -> Tensor:
        """The sum of the chosen experts and of the shared expert. Experts of latent vectors have no
        norms of their own."""
        norm, norms = spec.own_norm, weights.norms
        if weights.latents is not None:
            total = self._linear(hidden, weights.latents.down)
            total = self._chosen_experts(spec, weights, hidden, total)
            total = self._linear(total, weights.latents.up)
        elif norm is None or norms is None:
            total = self._chosen_experts(spec, weights, hidden, hidden)
        else:
            scored = self._norm(residual, norm, norms.router)
            total = self._norm(residual, norm, norms.before)
            total = self._chosen_experts(spec, weights, scored, total)
            total = self._norm(total, norm, norms.after)
        if spec.shared is None or weights.shared is None:
            return total
        shared = self._mlp(spec.shared, weights.shared, hidden)
        if weights.shared_gate is not None:
            shared = shared * torch.sigmoid(self._linear(hidden, weights.shared_gate))
        if norm is not None and norms is not None:
            shared = self._norm(shared, norm, norms.after_shared)
        return total + shared

    def _chosen_experts(
        self, spec: Experts, weights: ExpertWeights, scored: Tensor, hidden: Tensor
    ) -> Tensor:
        """Each expert computes its tokens, whose results are added in the order of the choice.
        ``scored`` is what the router reads."""
        router = spec.router
        logits = self._linear(scored, weights.router)
        chosen, shares = self._ops.choose_experts(logits, router, weights.correction)
        if weights.factors is not None:
            shares = shares * weights.factors[chosen]
        if weights.stacked is not None:
            return self._stacked_experts(spec, weights.stacked, chosen, shares, hidden)
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
        return computed.sum(dim=1)

    def _stacked_experts(
        self, spec: Experts, weights: StackedMlps, chosen: Tensor, shares: Tensor, hidden: Tensor
    ) -> Tensor:
        """The same as a few products of all experts, which do not wait for the device."""
        ops, num_shared = self._ops, chosen.shape[1]
        if spec.router.weighs_inputs:
            weighed = (hidden.unsqueeze(1) * shares.unsqueeze(2)).to(hidden.dtype)
            hidden, shares, num_shared = weighed.flatten(0, 1), torch.ones_like(shares), 1
        order, starts = ops.group_rows(chosen, spec.count)
        inner = weights.gate_up.product(hidden, order, starts, ops, num_shared=num_shared)
        inner = self._activated(spec.expert, inner)
        outputs = weights.down.product(inner, order, starts, ops)
        return ops.sum_experts(outputs, shares)

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
        return linear.product(hidden, self._ops)


def attention_spec(
    spec: Attention, weights: AttentionWeights, tables: PositionTables
) -> AttentionSpec:
    """The facts of a layer's attention that the kernels need."""
    return AttentionSpec(
        scale=spec.scale,
        window=spec.window,
        chunk=spec.chunk,
        softcap=spec.softcap,
        slopes=tables.slopes(spec),
        sinks=weights.sinks,
        value_dim=None if spec.latent is None else spec.latent.rank,
    )


def _groups_of_heads(
    num_tokens: int, num_heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The heads of all tokens, grouped by head; see `kernels.reference.group_rows`."""
    rows = torch.arange(num_tokens * num_heads, dtype=torch.int32, device=device)
    starts = torch.arange(num_heads + 1, dtype=torch.int32, device=device) * num_tokens
    return rows.view(num_tokens, num_heads).t().flatten(), starts


def _is_plain(norm: Norm, weights: NormWeights, dtype: torch.dtype) -> bool:
    """Whether the kernels know the norm."""
    has_dtype = weights.weight is not None and weights.weight.dtype == dtype
    return norm.kind == "rms" and has_dtype and weights.bias is None


def _has_planes(part: object) -> bool:
    """Whether a weight in ``part`` is multiplied in planes, and not as the floats that it was
    expanded to in earlier releases."""
    if isinstance(part, tuple | list):
        return any(map(_has_planes, part))
    if not is_dataclass(part):
        return False
    return isinstance(part, Planes) or any(
        _has_planes(getattr(part, field.name)) for field in fields(part)
    )
