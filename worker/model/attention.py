"""Attention of one layer over the paged cache: what native and foreign decoders share."""

from torch import Tensor

from kernels.providers import Ops
from worker.model.interface import ForwardInputs
from worker.model.kv_cache import KVCache


def attend(
    ops: Ops,
    inputs: ForwardInputs,
    kv_cache: KVCache,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Store this step's keys and values, then attend to all of each sequence's context.

    ``query`` is [num_tokens, num_heads, head_dim], ``key`` and ``value`` are [num_tokens,
    num_kv_heads, head_dim], rotary positions already applied. Returns the shape of ``query``.
    """
    key_cache, value_cache = kv_cache.layer(layer)
    ops.store_kv(key, value, key_cache, value_cache, inputs.slots)
    return ops.paged_attention(
        query,
        key_cache,
        value_cache,
        inputs.block_tables,
        inputs.query_starts,
        inputs.context_lens,
        num_decodes=inputs.num_decodes,
        max_query_len=inputs.max_query_len,
        scale=scale,
        sliding_window=sliding_window,
    )
