"""Cases of kernels that Llama lacks: experts, sinks, latent vectors, wide heads and recurrences."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.random_weights import RandomWeights
from kernels.attention_spec import AttentionSpec
from kernels.planes import Planes
from kernels.providers import Ops


@dataclass(frozen=True, kw_only=True)
class MixerShapes:
    """The sizes of layers, each of another family."""

    hidden_size: int
    num_experts: int
    top_k: int
    expert_size: int
    latent_rank: int
    rotated_dim: int
    latent_heads: int
    wide_dim: int
    sink_heads: int
    """Eight heads share keys."""
    delta_heads: int
    """Heads of values; half as many heads of keys."""
    delta_dim: int
    space_heads: int
    space_dim: int
    state_dim: int


PUBLISHED = MixerShapes(
    hidden_size=2048,
    num_experts=128,
    top_k=8,
    expert_size=768,
    latent_rank=512,
    rotated_dim=64,
    latent_heads=16,
    wide_dim=512,
    sink_heads=64,
    delta_heads=32,
    delta_dim=128,
    space_heads=64,
    space_dim=64,
    state_dim=128,
)
"""Experts of Qwen3-30B-A3B, latent vectors of DeepSeek-V2-Lite, heads of Gemma 4, the gated delta
rule of Qwen3-Next, and a state space of about the same size."""
TINY = MixerShapes(
    hidden_size=64,
    num_experts=4,
    top_k=2,
    expert_size=32,
    latent_rank=32,
    rotated_dim=16,
    latent_heads=2,
    wide_dim=64,
    sink_heads=8,
    delta_heads=2,
    delta_dim=16,
    space_heads=2,
    space_dim=16,
    state_dim=16,
)


class Mixers:
    """Inputs of random numbers on a device."""

    def __init__(
        self, shapes: MixerShapes, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shapes = shapes
        self._block_size = block_size
        self._device = device
        self._dtype = dtype

    def all(self, batches: tuple[int, ...], num_tokens: int, context_len: int) -> Iterator[Case]:
        """Decodes of so many sequences, and a prompt of ``num_tokens``."""
        for num_seqs in batches:
            yield self.experts(num_seqs)
            yield self.packed_experts(num_seqs)
        yield self.experts(num_tokens)
        yield self.packed_experts(num_tokens)
        few = batches[len(batches) // 2]
        yield self.sinks(few, context_len)
        yield self.latent(few, context_len)
        yield self.wide(few, context_len)
        for lens in ([1] * few, [num_tokens // 4]):
            yield self.delta_rule(lens)
            yield self.state_space(lens)
            yield self.convolution(lens)

    def experts(self, num_tokens: int) -> Case:
        """The first product of all experts, with gates, and the rows of each."""
        shapes = self._shapes
        chosen = self._chosen(num_tokens)
        hidden = self._normal(num_tokens, shapes.hidden_size)
        weight = self._normal(shapes.num_experts, 2 * shapes.expert_size, shapes.hidden_size)
        num_read = len(set(chosen.flatten().tolist()))
        return Case(
            name=f"experts, {num_tokens}",
            call=partial(_experts, num_shared=shapes.top_k),
            tensors=(hidden, weight / shapes.hidden_size**0.5, chosen),
            num_bytes=num_read * weight[0].nbytes,
            num_flops=2 * chosen.numel() * weight[0].numel(),
        )

    def packed_experts(self, num_tokens: int) -> Case:
        """The same with matrices in MXFP4."""
        shapes = self._shapes
        chosen = self._chosen(num_tokens)
        outputs = 2 * shapes.expert_size
        random = RandomWeights(self._device, self._dtype)
        inputs = max(256, shapes.hidden_size)
        planes = random.planes("mxfp4", shapes.num_experts * outputs, inputs)
        num_read = len(set(chosen.flatten().tolist()))
        return Case(
            name=f"experts in mxfp4, {num_tokens}",
            call=partial(_packed_experts, num_experts=shapes.num_experts, num_shared=shapes.top_k),
            tensors=(self._normal(num_tokens, inputs), *planes.tensors, chosen),
            num_bytes=num_read * planes.num_bytes / shapes.num_experts,
            num_flops=2 * chosen.numel() * outputs * inputs,
        )

    def _chosen(self, num_tokens: int) -> Tensor:
        ranks = torch.rand(num_tokens, self._shapes.num_experts, device=self._device)
        return ranks.topk(self._shapes.top_k).indices

    def sinks(self, num_seqs: int, context_len: int) -> Case:
        """Decodes of gpt-oss, behind a window of half of the context."""
        num_heads = self._shapes.sink_heads
        spec = AttentionSpec(
            scale=0.125, sinks=torch.randn(num_heads, device=self._device), window=context_len // 2
        )
        heads = (num_heads, num_heads // 8, 64)
        return self._decodes("sinks", num_seqs, context_len, heads, spec)

    def latent(self, num_seqs: int, context_len: int) -> Case:
        shapes = self._shapes
        head_dim = shapes.latent_rank + shapes.rotated_dim
        spec = AttentionSpec(scale=head_dim**-0.5, value_dim=shapes.latent_rank)
        heads = (shapes.latent_heads, 1, head_dim)
        return self._decodes("latent", num_seqs, context_len, heads, spec)

    def wide(self, num_seqs: int, context_len: int) -> Case:
        dim = self._shapes.wide_dim
        spec = AttentionSpec(scale=dim**-0.5)
        return self._decodes(f"heads of {dim}", num_seqs, context_len, (8, 1, dim), spec)

    def delta_rule(self, lens: list[int]) -> Case:
        shapes, num_tokens = self._shapes, sum(lens)
        heads, dim = shapes.delta_heads, shapes.delta_dim
        keys = (self._normal(num_tokens, heads // 2, dim) for _ in range(2))
        states = self._floats(len(lens), heads, dim, dim)
        rates = (torch.rand(num_tokens, heads, device=self._device) for _ in range(2))
        tensors = (*keys, self._normal(num_tokens, heads, dim), *rates, states, self._starts(lens))
        return Case(
            name=f"gated_delta_rule, {_lens(lens)}",
            call=partial(_call, "gated_delta_rule"),
            tensors=tensors,
            num_bytes=2 * states.nbytes + sum(tensor.nbytes for tensor in tensors[:5]),
        )

    def state_space(self, lens: list[int]) -> Case:
        shapes, num_tokens = self._shapes, sum(lens)
        heads, dim, state_dim = shapes.space_heads, shapes.space_dim, shapes.state_dim
        states = self._floats(len(lens), heads, dim, state_dim)
        tensors = (
            self._floats(num_tokens, heads, dim),
            torch.rand(num_tokens, heads, device=self._device),
            -torch.rand(heads, device=self._device),
            self._floats(num_tokens, 1, state_dim),
            self._floats(num_tokens, 1, state_dim),
            states,
            self._starts(lens),
        )
        return Case(
            name=f"state_space, {_lens(lens)}",
            call=partial(_call, "state_space"),
            tensors=tensors,
            num_bytes=2 * states.nbytes + 2 * tensors[0].nbytes,
        )

    def convolution(self, lens: list[int]) -> Case:
        size = 2 * self._shapes.delta_heads * self._shapes.delta_dim
        hidden = self._normal(sum(lens), size)
        states = self._floats(len(lens), 3, size)
        return Case(
            name=f"short_convolution, {_lens(lens)}",
            call=_convolution,
            tensors=(hidden, self._floats(4, size), states, self._starts(lens)),
            num_bytes=2 * hidden.nbytes + 2 * states.nbytes,
        )

    def _decodes(
        self,
        name: str,
        num_seqs: int,
        context_len: int,
        heads: tuple[int, int, int],
        spec: AttentionSpec,
    ) -> Case:
        num_heads, num_kv_heads, head_dim = heads
        num_blocks = -(-context_len // self._block_size)
        shape = (num_seqs * num_blocks, self._block_size, num_kv_heads, head_dim)
        keys = self._normal(*shape)
        blocks = torch.randperm(num_seqs * num_blocks, device=self._device).int()
        visible = min(context_len, spec.window or context_len)
        num_vectors = num_seqs * visible * num_kv_heads * (1 if spec.value_dim else 2)
        return Case(
            name=f"attention, {name}, {num_seqs} x 1 in {context_len}",
            call=partial(_attention, num_decodes=num_seqs, max_query_len=1, spec=spec),
            tensors=(
                self._normal(num_seqs, num_heads, head_dim),
                keys,
                keys if spec.value_dim else self._normal(*shape),
                blocks.view(num_seqs, num_blocks),
                self._starts([1] * num_seqs),
                torch.full((num_seqs,), context_len, dtype=torch.int32, device=self._device),
            ),
            num_bytes=num_vectors * head_dim * self._dtype.itemsize,
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device)

    def _starts(self, lens: list[int]) -> Tensor:
        return torch.tensor([0, *lens], device=self._device).cumsum(0).int()


def _lens(lens: list[int]) -> str:
    return f"{len(lens)} x {lens[0]}"


def _call(name: str, ops: Ops, *tensors: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = getattr(ops, name)(*tensors)
    return found


def _attention(ops: Ops, *tensors: Tensor, **options: Any) -> Tensor:
    return ops.paged_attention(*tensors, **options)


def _convolution(
    ops: Ops, hidden: Tensor, taps: Tensor, states: Tensor, starts: Tensor
) -> tuple[Tensor, ...]:
    return ops.short_convolution(hidden, taps, None, states, starts)


def _experts(
    ops: Ops, hidden: Tensor, weight: Tensor, chosen: Tensor, *, num_shared: int
) -> Tensor:
    order, starts = ops.group_rows(chosen, len(weight))
    return ops.grouped_projection(hidden, weight, None, order, starts, num_shared=num_shared)


def _packed_experts(
    ops: Ops, hidden: Tensor, *tensors: Tensor, num_experts: int, num_shared: int
) -> Tensor:
    *parts, chosen = tensors
    planes = Planes("mxfp4", hidden.shape[1], *parts)
    order, starts = ops.group_rows(chosen, num_experts)
    return ops.grouped_plane_linear(hidden, planes, None, order, starts, num_shared=num_shared)
