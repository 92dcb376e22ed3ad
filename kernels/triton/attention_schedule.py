"""Divides the attention of sequences of any lengths into programs of about equal work.

A program computes one tile of a sequence's rows over one split of its context, as in Flash-Decoding
(Dao et al., 2023). The length of a split is chosen on the device from the lengths of all sequences,
so that one long context among many short ones is shared among as many programs as the device runs,
and a CUDA graph holds for any lengths. Each program finds its work by itself, in the sums over the
sequences: this takes about a microsecond and needs no other kernel.
"""

import triton
import triton.language as tl


@triton.jit
def work_of(
    item,
    starts_ptr,
    lens_ptr,
    num_seqs,
    num_wanted,
    split_len,
    window,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The work of program ``item``: (sequence, tile of rows, split, number of splits, their length,
    the first token of the first one).

    Splits have ``split_len`` tokens; if that is 0, at least MIN_SPLIT and as many as make
    ``num_wanted`` programs, and one more for each tile. The sequence is at least ``num_seqs`` if
    there is no work for the program. The splits of one tile are those of adjacent programs. The
    last tile has the longest context, so it starts first.
    """
    seqs = tl.arange(0, BLOCK_S)
    is_seq = seqs < num_seqs
    starts = tl.load(starts_ptr + seqs, mask=is_seq, other=0)
    ends = tl.load(starts_ptr + seqs + 1, mask=is_seq, other=0)
    lens = tl.load(lens_ptr + seqs, mask=is_seq, other=0)
    num_tiles = tl.cdiv((ends - starts) * GROUP, BLOCK_M)
    visible = lens - first_split(lens, ends - starts, window, HAS_WINDOW, ALIGNMENT)
    equal_share = tl.cdiv(tl.sum(num_tiles * visible), num_wanted)
    equal_len = tl.maximum(tl.cdiv(equal_share, ALIGNMENT) * ALIGNMENT, MIN_SPLIT)
    split_len = tl.where(split_len == 0, equal_len, split_len)
    # A sequence without tokens, used to pad graphs, has one split, which returns zeros.
    num_items = num_tiles * tl.maximum(tl.cdiv(visible, split_len), 1)
    last_items = tl.cumsum(num_items)
    seq = tl.sum((last_items <= item).to(tl.int32))
    place = item - tl.sum(tl.where(seqs < seq, num_items, 0))
    found = tl.minimum(seq, num_seqs - 1)
    start, end = tl.load(starts_ptr + found), tl.load(starts_ptr + found + 1)
    context_len = tl.load(lens_ptr + found)
    base = first_split(context_len, end - start, window, HAS_WINDOW, ALIGNMENT)
    num_splits = tl.maximum(tl.cdiv(context_len - base, split_len), 1)
    tile = tl.cdiv((end - start) * GROUP, BLOCK_M) - 1 - place // num_splits
    return seq, tile, place % num_splits, num_splits, split_len, base


@triton.jit
def first_split(context_len, num_tokens, window, HAS_WINDOW: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where the splits begin: at or before the first token that the first of the new tokens
    sees."""
    if HAS_WINDOW:
        base = tl.maximum(context_len - num_tokens + 1 - window, 0) // ALIGNMENT * ALIGNMENT
    else:
        base = context_len * 0
    return base


@triton.jit
def tile_span(
    tile,
    context_len,
    num_tokens,
    window,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tokens that the rows of a tile see: from the first, rounded down to a multiple of
    BLOCK_N, to the last, exclusively; and the position of the tile's first token."""
    num_before = context_len - num_tokens
    first_position = num_before + tile * BLOCK_M // GROUP
    last_row = tl.minimum((tile + 1) * BLOCK_M, num_tokens * GROUP) - 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    return begin, num_before + last_row // GROUP + 1, first_position
