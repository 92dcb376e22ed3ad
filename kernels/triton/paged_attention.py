"""Causal attention of packed queries over a paged KV cache."""

import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.reference.paged_attention import check_attention
from kernels.triton.configurations import POINTER_TYPES
from kernels.triton.scheduled_attention import Sequences, attend
from kernels.triton.tokens import check_contiguous, check_dtypes, check_tokens

MAX_HEAD_DIM = 512
"""The most elements of a value; a latent vector may have some more, which are no values."""


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    spec: AttentionSpec,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.paged_attention`; the result is contiguous.

    bfloat16, float16 or float32; head_dim is a multiple of 16 and at most 512, or there is a
    ``value_dim`` of this kind. The scale is positive. ``query`` may be a slice of
    a fused projection: its tokens may be strided, but not a token's heads. Sums are float32.
    Lengths stay on the device, and launch parameters depend only on shapes and keywords, so a CUDA
    graph of a batch of decodes is valid for all contexts that fit its block table.

    With ``is_batch_invariant`` a token's result is bit-identical whatever else is in the batch and
    however its prompt was chunked. Contexts are then split every 512 tokens and chunks use the
    tiles of decodes, which is slower.
    """
    check_attention(query, key_cache, value_cache, block_tables, query_starts, context_lens)
    value_dim = spec.value_dim or query.shape[2]
    _check_layout(
        value_dim, query, key_cache, value_cache, block_tables, query_starts, context_lens
    )
    out = query.new_empty(*query.shape[:2], value_dim)
    num_seqs, num_chunk_tokens = context_lens.shape[0], query.shape[0] - num_decodes
    for sequences in (
        Sequences(0, num_decodes, num_decodes, max_query_len=1),
        Sequences(num_decodes, num_seqs, num_chunk_tokens, max_query_len),
    ):
        if len(sequences):
            attend(
                out,
                query,
                key_cache,
                value_cache,
                block_tables,
                query_starts,
                context_lens,
                sequences,
                spec=spec,
                is_batch_invariant=is_batch_invariant,
            )
    return out


def _check_layout(
    value_dim: int, query: Tensor, key_cache: Tensor, value_cache: Tensor, *indices: Tensor
) -> None:
    if query.dtype not in POINTER_TYPES:
        raise ValueError(f"query of {query.dtype}, expected bfloat16, float16 or float32")
    if value_dim % 16 or value_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {value_dim}, expected a multiple of 16 up to {MAX_HEAD_DIM}")
    check_dtypes(query=query, key_cache=key_cache, value_cache=value_cache)
    check_tokens(query=query)
    check_contiguous(key_cache=key_cache, value_cache=value_cache)
    for index in indices:
        if index.dtype != torch.int32 or index.stride(-1) != 1:
            raise ValueError(
                f"indices of {index.dtype} with strides {index.stride()}, expected int32 rows"
            )
