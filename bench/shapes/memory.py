"""The memory that sequences take, from the sizes of the real cache."""

from dataclasses import dataclass, replace

import torch

from worker.model.cache_layout import layout_of_spec
from worker.model.kv_cache import BlockShape
from worker.model.spec import ModelSpec
from worker.model.start import RunnerLimits


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of sequences in a cache of bfloat16, in bytes."""

    tokens: int
    """Keys and values."""
    states: int
    """The states that a step reads and writes."""

    @property
    def total(self) -> int:
        return self.tokens + self.states


def memory_of(spec: ModelSpec, num_seqs: int, num_tokens: int) -> Memory:
    """The memory of so many sequences of ``num_tokens``, in whole blocks."""
    limits, dtype = RunnerLimits(), torch.bfloat16
    layout = layout_of_spec(spec, num_tokens, "native", limits.block_size, dtype)
    block = BlockShape(
        layout.num_places, limits.block_size, spec.num_kv_heads, spec.head_dim, dtype
    )
    num_states = 0 if layout.state is None else 2 * layout.state.num_blocks
    num_blocks = limits.divide(1, layout).num_blocks_for(num_tokens)
    each = num_seqs * block.num_bytes
    return Memory(tokens=(num_blocks - num_states) * each, states=num_states * each)


def with_attention_alone(spec: ModelSpec) -> ModelSpec:
    """The same model with its attention in place of recurrences."""
    attention = spec.attentions[0]
    layers = (replace(layer, attention=attention, recurrence=None) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))
