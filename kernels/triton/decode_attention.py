"""Decode attention: one token per sequence. Contexts are split, and the splits' results merged.

Flash-Decoding (Dao et al., 2023): without splits a few long sequences would leave most of the
device idle. The minimum traffic is each visible key and value once, num_kv_heads * head_dim * 2
elements per token, with 4 * num_heads * head_dim FLOPs per token, which is below the ratio of a
GPU. A split of n tokens writes and reads back (head_dim + 2) * 4 bytes for each query head.
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
from kernels.triton.attention_tiles import AttentionKind, decode_tile, num_multiprocessors
from kernels.triton.configurations import Configuration, launch

MIN_SPLIT_LEN = 128
INVARIANT_SPLIT_LEN = 512
"""Tokens per split in batch-invariant mode, in which splits must not depend on the batch."""
_MAX_NUM_SPLITS = 64
_PROGRAMS_A_MULTIPROCESSOR = 12
"""Three run at a time; after four waves the partially filled last one costs little."""


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_attention_kernel(
    out_ptr,
    highest_ptr,
    total_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    lens_ptr,
    query_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (key head, sequence, split): all heads of the group attend to one split."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(0) * GROUP, tl.num_programs(2)
    context_len = tl.load(lens_ptr + seq)
    first, base, split_len = _splits(
        context_len, num_splits, window, HAS_WINDOW, SPLIT_LEN, BLOCK_N
    )
    end = tl.minimum(base + (split + 1) * split_len, context_len)
    begin = tl.maximum(base + split * split_len, first // BLOCK_N * BLOCK_N)
    # A sequence without tokens, used to pad graphs, still returns zeros.
    if begin >= end and not IS_WHOLE:
        return
    members, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    is_place = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query_ptr + seq.to(tl.int64) * query_stride + places, mask=is_place, other=0.0)
    layer = layer_of(
        seq, key_ptr, value_ptr, tables_ptr, slot_stride, table_stride, scale, window, HEAD_DIM
    )
    position = context_len - 1
    rows = (query, tl.full([BLOCK_M], 0, tl.int32) + position, position)
    highest, total, weighted = attend_span(
        rows, layer, begin, end, BLOCK_SIZE, HEAD_DIM, BLOCK_N, HAS_WINDOW
    )
    if IS_WHOLE:
        out = normalised(total, weighted).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + seq.to(tl.int64) * num_heads * HEAD_DIM + places, out, mask=is_place)
    else:
        parts = (seq.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(highest_ptr + parts, highest, mask=is_head)
        tl.store(total_ptr + parts, total, mask=is_head)
        out_places = parts[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_ptr + out_places, weighted, mask=is_place)


@triton.jit(do_not_specialize=["num_splits", "window"])
def merge_splits_kernel(
    out_ptr,
    weighted_ptr,
    highest_ptr,
    total_ptr,
    lens_ptr,
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (head, sequence): merge that head's splits from the first to the last."""
    seq = tl.program_id(1)
    row = seq.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    context_len = tl.load(lens_ptr + seq)
    _, base, split_len = _splits(context_len, num_splits, window, HAS_WINDOW, SPLIT_LEN, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)[None, :]
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, BLOCK_D], tl.float32)
    for split in tl.range(tl.cdiv(context_len - base, split_len)):
        part = row * num_splits + split + tl.arange(0, 1)
        highest, total, weighted = merge_spans(
            highest,
            total,
            weighted,
            tl.load(highest_ptr + part),
            tl.load(total_ptr + part),
            tl.load(
                weighted_ptr + part[:, None] * HEAD_DIM + columns,
                mask=columns < HEAD_DIM,
                other=0.0,
            ),
        )
    out = normalised(total, weighted).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + columns, out, mask=columns < HEAD_DIM)


@triton.jit
def _splits(
    context_len,
    num_splits,
    window,
    HAS_WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The first visible token, where the first split starts, and the length of the splits.

    Splits are SPLIT_LEN long, or just long enough for ``num_splits`` to cover the context.
    """
    first = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
    base = first // SPLIT_LEN * SPLIT_LEN
    needed = tl.cdiv(tl.cdiv(context_len - base, num_splits), BLOCK_N) * BLOCK_N
    return first, base, tl.maximum(needed, SPLIT_LEN)


def decode_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    is_batch_invariant: bool,
) -> None:
    """Write the attention of ``query`` [num_seqs, num_heads, head_dim] to ``out``, contiguous.

    Otherwise as in `kernels.reference.paged_attention`. Launch parameters depend on shapes alone.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    kind = AttentionKind.of(query, key_cache, sliding_window)
    split_len = INVARIANT_SPLIT_LEN if is_batch_invariant else MIN_SPLIT_LEN
    num_splits = _num_splits(kind, block_tables.shape[1], sliding_window, split_len)
    if not is_batch_invariant:
        num_splits = min(num_splits, _enough_splits(num_seqs * num_kv_heads, query.device))
    is_whole = num_splits == 1
    window = sliding_window or 0
    rows = (num_seqs, num_heads, num_splits)
    # Two allocations, because Triton compiles again for an address that is no multiple of 16.
    highest = query.new_empty((0, 0, 0) if is_whole else rows, dtype=torch.float32)
    total = torch.empty_like(highest)
    weighted = out if is_whole else query.new_empty(*rows, head_dim, dtype=torch.float32)
    launch(
        attend_configuration(kind, split_len, is_whole),
        (num_kv_heads, num_seqs, num_splits),
        weighted,
        highest,
        total,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query.stride(0),
        num_kv_heads * head_dim,
        block_tables.stride(0),
        scale * LOG2_E,
        window,
    )
    if not is_whole:
        launch(
            merge_configuration(kind, split_len),
            (num_heads, num_seqs),
            out,
            weighted,
            highest,
            total,
            context_lens,
            num_splits,
            window,
        )


def _num_splits(
    kind: AttentionKind, max_num_blocks: int, sliding_window: int | None, split_len: int
) -> int:
    """The number of splits of ``split_len`` that cover any context within the table and the
    window."""
    visible = max_num_blocks * kind.block_size
    if sliding_window is not None:
        # The window may start at the last token of a split.
        visible = min(visible, sliding_window + split_len - 1)
    return max(1, -(-visible // split_len))


def _enough_splits(num_programs: int, device: torch.device) -> int:
    """The number of splits per program, of ``num_programs``, that fills the device."""
    wanted = _PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors(device)
    return min(_MAX_NUM_SPLITS, -(-wanted // num_programs))


@cache
def attend_configuration(kind: AttentionKind, split_len: int, is_whole: bool) -> Configuration:
    tile = decode_tile(kind)
    out_pointer = kind.pointer if is_whole else "*fp32:16"
    splits = {"out_ptr": out_pointer, "highest_ptr": "*fp32:16", "total_ptr": "*fp32:16"}
    return Configuration(
        kernel=decode_attention_kernel,
        signature={**kind.signature, **splits},
        constexprs={
            **kind.constexprs,
            "IS_WHOLE": is_whole,
            "SPLIT_LEN": split_len,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@cache
def merge_configuration(kind: AttentionKind, split_len: int) -> Configuration:
    return Configuration(
        kernel=merge_splits_kernel,
        signature={
            "out_ptr": kind.pointer,
            "weighted_ptr": "*fp32:16",
            "highest_ptr": "*fp32:16",
            "total_ptr": "*fp32:16",
            "lens_ptr": "*i32:16",
            "num_splits": "i32",
            "window": "i32",
        },
        constexprs={
            "HEAD_DIM": kind.head_dim,
            "HAS_WINDOW": kind.has_window,
            "SPLIT_LEN": split_len,
            "BLOCK_N": decode_tile(kind).keys,
            "BLOCK_D": kind.width,
        },
        num_warps=1,
    )


def _configurations() -> Iterator[Configuration]:
    for head_dim, group, has_window in ((64, 3, False), (128, 4, False), (256, 4, True)):
        kind = AttentionKind(torch.bfloat16, head_dim, group, 16, has_window, 80)
        yield attend_configuration(kind, MIN_SPLIT_LEN, is_whole=False)
        yield merge_configuration(kind, MIN_SPLIT_LEN)
    kind = AttentionKind(torch.float32, 128, 1, 32, False, 80)
    yield attend_configuration(kind, INVARIANT_SPLIT_LEN, is_whole=True)


CONFIGURATIONS = tuple(_configurations())
