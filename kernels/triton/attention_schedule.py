"""Divides the attention of sequences of any lengths into programs of about equal work.

A program computes a tile of a sequence's rows over a split of its context, as in Flash-Decoding
(Dao et al., 2023). The length of a split is chosen on the device from the lengths of all sequences,
so that a long context among many short contexts is shared among as many programs as the device
runs, and a CUDA graph holds for any lengths. Each program finds its work by itself, in sums over
the sequences, while the previous kernel still runs.
"""

from typing import Literal, TypeAlias

import triton
import triton.language as tl

View: TypeAlias = Literal["all", "window", "chunk"]
"""What a token sees of its context: all tokens, a window up to itself, or its own chunk."""


@triton.jit
def first_visible(position, window, VIEW: tl.constexpr):
    """`kernels.attention_spec.AttentionSpec.first_visible`, where ``window`` is the length of a
    window or of a chunk; the position of a sequence without context is -1."""
    if VIEW == "window":
        first = tl.maximum(position + 1 - window, 0)
    elif VIEW == "chunk":
        first = tl.maximum(position, 0) // window * window
    else:
        first = position * 0
    return first


@triton.jit
def work_of(
    item,
    starts_ptr,
    lens_ptr,
    schedule,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The work of program ``item``: (sequence, tile of rows, split, number of splits, their length,
    the first token of the first split).

    ``schedule`` is (num_seqs, num_wanted, split_len, window), see `first_visible`. Splits have
    ``split_len`` tokens; if that is 0, at least MIN_SPLIT and as many as make ``num_wanted``
    programs, and another for each tile. The sequence is at least ``num_seqs`` if there is no work
    for the program. Adjacent programs have the splits of a tile. The last tile has the longest
    context, so it starts first.
    """
    num_tiles, num_splits, split_len = _all_shares(
        starts_ptr, lens_ptr, schedule, BLOCK_S, BLOCK_M, GROUP, VIEW, ALIGNMENT, MIN_SPLIT
    )
    seq, num_before = _sequence_at(item, num_tiles * num_splits, BLOCK_S)
    own_tiles, own_splits, base = _share_of(
        seq, starts_ptr, lens_ptr, schedule, split_len, BLOCK_M, GROUP, VIEW, ALIGNMENT
    )
    place = item - num_before
    tile = own_tiles - 1 - place // own_splits
    return seq, tile, place % own_splits, own_splits, split_len, base


@triton.jit
def tile_of(
    index,
    starts_ptr,
    lens_ptr,
    schedule,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Tile ``index`` of all sequences: (sequence, tile of rows, item of its first split, number of
    splits, their length, the first token of the first split); see `work_of`."""
    num_tiles, num_splits, split_len = _all_shares(
        starts_ptr, lens_ptr, schedule, BLOCK_S, BLOCK_M, GROUP, VIEW, ALIGNMENT, MIN_SPLIT
    )
    seq, num_before = _sequence_at(index, num_tiles, BLOCK_S)
    own_tiles, own_splits, base = _share_of(
        seq, starts_ptr, lens_ptr, schedule, split_len, BLOCK_M, GROUP, VIEW, ALIGNMENT
    )
    is_before = tl.arange(0, BLOCK_S) < seq
    first_item = tl.sum(tl.where(is_before, num_tiles * num_splits, 0))
    tile = index - num_before
    return seq, tile, first_item + (own_tiles - 1 - tile) * own_splits, own_splits, split_len, base


@triton.jit
def _all_shares(
    starts_ptr,
    lens_ptr,
    schedule,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """The numbers of tiles and of splits of each sequence [BLOCK_S], and the length of a split."""
    num_seqs, num_wanted, split_len, window = schedule
    seqs = tl.arange(0, BLOCK_S)
    is_seq = seqs < num_seqs
    starts = tl.load(starts_ptr + seqs, mask=is_seq, other=0)
    ends = tl.load(starts_ptr + seqs + 1, mask=is_seq, other=0)
    lens = tl.load(lens_ptr + seqs, mask=is_seq, other=0)
    num_tiles = tl.cdiv((ends - starts) * GROUP, BLOCK_M)
    visible = lens - _first_split(lens, ends - starts, window, VIEW, ALIGNMENT)
    equal_share = tl.cdiv(tl.sum(num_tiles * visible), num_wanted)
    equal_len = tl.maximum(tl.cdiv(equal_share, ALIGNMENT) * ALIGNMENT, MIN_SPLIT)
    # After a branch instead, Triton would not pipeline the loops over the context.
    split_len = tl.where(split_len == 0, equal_len, split_len)
    return num_tiles, _num_splits(visible, split_len), split_len


@triton.jit
def _share_of(
    seq,
    starts_ptr,
    lens_ptr,
    schedule,
    split_len,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The numbers of tiles and of splits of a sequence, and where its splits begin."""
    num_seqs, _, _, window = schedule
    seq = tl.minimum(seq, num_seqs - 1)
    num_tokens = tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq)
    context_len = tl.load(lens_ptr + seq)
    base = _first_split(context_len, num_tokens, window, VIEW, ALIGNMENT)
    return (
        tl.cdiv(num_tokens * GROUP, BLOCK_M),
        _num_splits(context_len - base, split_len),
        base,
    )


@triton.jit
def _num_splits(num_visible, split_len):
    """A sequence without context, used to pad graphs, has one split, which returns zeros."""
    return tl.maximum(tl.cdiv(num_visible, split_len), 1)


@triton.jit
def _first_split(context_len, num_tokens, window, VIEW: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where the splits begin: at or before the first token that the first of the new tokens
    sees."""
    first = first_visible(context_len - num_tokens, window, VIEW)
    return first // ALIGNMENT * ALIGNMENT


@triton.jit
def _sequence_at(place, counts, BLOCK_S: tl.constexpr):
    """The sequence of item ``place`` if each sequence has as many items as ``counts`` [BLOCK_S]
    says, and the number of items of all sequences before it."""
    seq = tl.sum((tl.cumsum(counts) <= place).to(tl.int32))
    return seq, tl.sum(tl.where(tl.arange(0, BLOCK_S) < seq, counts, 0))


@triton.jit
def tile_span(
    tile,
    context_len,
    num_tokens,
    window,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tokens that the rows of a tile see: from the first, rounded down to a multiple of
    BLOCK_N, to the last, exclusively; and the position of the tile's first token."""
    num_before = context_len - num_tokens
    first_position = num_before + tile * BLOCK_M // GROUP
    last_row = tl.minimum((tile + 1) * BLOCK_M, num_tokens * GROUP) - 1
    begin = first_visible(first_position, window, VIEW) // BLOCK_N * BLOCK_N
    return begin, num_before + last_row // GROUP + 1, first_position
