"""Attention of a layer over the paged cache, used by the native and the transformers decoder."""

from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.providers import Ops
from worker.model.forward import ForwardInputs


def attend(
    ops: Ops,
    inputs: ForwardInputs,
    group: int,
    layer_cache: tuple[Tensor, Tensor],
    query: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Attend to each sequence's whole context; this step's keys and values are already stored.

    ``layer_cache`` has the keys and values of a layer of this ``group``; ``query`` is [num_tokens,
    num_heads, head_dim], with rotary positions applied. Returns its shape.
    """
    key_cache, value_cache = layer_cache
    return ops.paged_attention(
        query,
        key_cache,
        value_cache,
        inputs.block_tables[group],
        inputs.query_starts,
        inputs.context_lens,
        num_decodes=inputs.num_decodes,
        max_query_len=inputs.max_query_len,
        spec=spec,
    )
