"""Attention of one layer over the paged cache, used by the native and the transformers decoder."""

from torch import Tensor

from kernels.providers import Ops
from worker.model.forward import ForwardInputs
from worker.model.kv_cache import KVCache


def attend(
    ops: Ops,
    inputs: ForwardInputs,
    kv_cache: KVCache,
    layer: int,
    query: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attend to each sequence's whole context; this step's keys and values are already stored.

    ``query`` is [num_tokens, num_heads, head_dim], with rotary positions applied. Returns its
    shape.
    """
    key_cache, value_cache = kv_cache.layer(layer)
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
