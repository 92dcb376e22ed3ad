"""Prefill attention: chunks of prompts attend to themselves and to earlier tokens in the cache.

FlashAttention-2 (Dao, arXiv:2307.08691) over packed chunks of any lengths. A chunk of n tokens at
the end of a context of c costs 4 * num_heads * head_dim * n * (c - (n - 1) / 2) FLOPs. The minimum
traffic is the chunk's queries and results, 2 * n * num_heads * head_dim elements, and the context's
keys and values once, 2 * c * num_kv_heads * head_dim; later tiles of rows find them in the L2
cache.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention_span import (
    LOG2_E,
    attend_span,
    layer_of,
    merge_spans,
    normalised,
)
from kernels.triton.attention_tiles import AttentionKind, Tile, decode_tile, prefill_tile
from kernels.triton.configurations import TARGETS, Configuration, launch
from kernels.triton.decode_attention import INVARIANT_SPLIT_LEN


@triton.jit(do_not_specialize=["first_seq", "table_stride", "window"])
def prefill_attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    first_seq,
    query_stride,
    out_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (key head, sequence, tile): attend with BLOCK_M rows, tokens times heads of the
    group.

    Without a SPLIT_LEN the context is one span; otherwise its spans are merged like those of
    decodes.
    """
    kv_head, seq = tl.program_id(0), first_seq + tl.program_id(1)
    # The last tile has the longest context, so it starts first.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    start = tl.load(starts_ptr + seq)
    num_tokens = tl.load(starts_ptr + seq + 1) - start
    num_rows = num_tokens * GROUP
    if tile * BLOCK_M >= num_rows:
        return
    num_before = tl.load(lens_ptr + seq) - num_tokens
    rows, columns = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, heads = (start + rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP
    places = heads[:, None] * HEAD_DIM + columns[None, :]
    is_place = (rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + (tokens * query_stride)[:, None] + places, mask=is_place, other=0.0)
    layer = layer_of(
        seq, key_ptr, value_ptr, tables_ptr, slot_stride, table_stride, scale, window, HEAD_DIM
    )
    first_position = num_before + tile * BLOCK_M // GROUP
    query_rows = (query, num_before + rows // GROUP, first_position)
    end = num_before + (tl.minimum((tile + 1) * BLOCK_M, num_rows) - 1) // GROUP + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    if SPLIT_LEN == 0:
        _, total, weighted = attend_span(
            query_rows, layer, begin, end, BLOCK_SIZE, HEAD_DIM, BLOCK_N, HAS_WINDOW
        )
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in tl.range(begin // SPLIT_LEN, tl.cdiv(end, SPLIT_LEN)):
            split_highest, split_total, split_weighted = attend_span(
                query_rows,
                layer,
                tl.maximum(begin, split * SPLIT_LEN),
                tl.minimum(end, (split + 1) * SPLIT_LEN),
                BLOCK_SIZE,
                HEAD_DIM,
                BLOCK_N,
                HAS_WINDOW,
            )
            highest, total, weighted = merge_spans(
                highest, total, weighted, split_highest, split_total, split_weighted
            )
    out = normalised(total, weighted).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (tokens * out_stride)[:, None] + places, out, mask=is_place)


def prefill_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    is_batch_invariant: bool,
) -> None:
    """Write the attention of the sequences from ``num_decodes`` on to their rows of ``out``.

    Otherwise as in `kernels.reference.paged_attention`. ``out`` is contiguous. With
    ``is_batch_invariant`` a token's result is bit-identical to that of `decode_attention`.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    kind = AttentionKind.of(query, key_cache, sliding_window)
    configuration = prefill_configuration(kind, is_batch_invariant)
    num_tiles = -(-max_query_len * kind.group // _tile(kind, is_batch_invariant).rows)
    launch(
        configuration,
        (num_kv_heads, context_lens.shape[0] - num_decodes, num_tiles),
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        num_decodes,
        query.stride(0),
        out.stride(0),
        num_kv_heads * head_dim,
        block_tables.stride(0),
        scale * LOG2_E,
        sliding_window or 0,
    )


def _tile(kind: AttentionKind, is_batch_invariant: bool) -> Tile:
    """The tile size. In batch-invariant mode it is that of decodes, because sums depend on the
    tile."""
    return decode_tile(kind) if is_batch_invariant else prefill_tile(kind)


@cache
def prefill_configuration(kind: AttentionKind, is_batch_invariant: bool) -> Configuration:
    tile = _tile(kind, is_batch_invariant)
    return Configuration(
        kernel=prefill_attention_kernel,
        signature={
            **kind.signature,
            "out_ptr": kind.pointer,
            "starts_ptr": "*i32:16",
            "first_seq": "i32",
            "out_stride": "i32:16",
        },
        constexprs={
            **kind.constexprs,
            "SPLIT_LEN": INVARIANT_SPLIT_LEN if is_batch_invariant else 0,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(kind.target,),
    )


def _configurations() -> Iterator[Configuration]:
    for target in TARGETS:
        for head_dim, group, has_window in ((64, 3, False), (128, 4, False), (256, 4, True)):
            kind = AttentionKind(torch.bfloat16, head_dim, group, 16, has_window, target)
            yield prefill_configuration(kind, is_batch_invariant=False)
    yield prefill_configuration(AttentionKind(torch.float32, 128, 1, 32, False, 90), False)
    yield prefill_configuration(AttentionKind(torch.float16, 128, 4, 16, False, 90), True)


CONFIGURATIONS = tuple(_configurations())
