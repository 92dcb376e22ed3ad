"""The core of decode and prefill attention: rows of queries attend to a span of a context.

The softmax is computed online, tile by tile, as in FlashAttention (Dao et al., arXiv:2205.14135 and
2307.08691); the tokens of a tile are located through the block table (PagedAttention, Kwon et al.,
arXiv:2309.06180). A row is a query head of a token. Heads that share keys are in one tile of rows,
so that each key is read once for all of them.
"""

import math

import triton
import triton.language as tl

from kernels.triton.attention_schedule import first_visible

LOG2_E = math.log2(math.e)
"""Scores are multiplied by this factor: the device has an instruction for exp2, but none for
exp."""


@triton.jit
def layer_of(
    seq,
    key_ptr,
    value_ptr,
    tables_ptr,
    slot_stride,
    table_stride,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
):
    """Keys and values of the program's key head at slot 0, the sequence's blocks, and the other
    parameters."""
    head = tl.program_id(0) * HEAD_DIM
    return (
        key_ptr + head,
        value_ptr + head,
        tables_ptr + seq.to(tl.int64) * table_stride,
        slot_stride,
        scale,
        window,
        softcap,
    )


@triton.jit
def attend_span(
    rows,
    layer,
    begin,
    end,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VIEW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Attend to the tokens ``begin`` .. ``end - 1``; ``begin`` is a multiple of BLOCK_N.

    ``rows`` is (their queries [rows, columns], where columns is VALUE_DIM padded with zeros to a
    power of two; the tails of the queries; the positions [rows] of their tokens; the lowest of
    these; the slopes [rows] of their heads, times log2(e)), ``layer`` the result of `layer_of`. No
    token from ``end`` on is read. With a TAIL_DIM, the TAIL_DIM elements after the first VALUE_DIM
    count for scores alone, and the first elements of keys are the values.

    Returns [rows] float32 the maximum score, [rows] float32 the sum of exp2(score - maximum), and
    [rows, columns] float32 the values weighted by the same: -inf, 0 and 0 for a row without visible
    tokens.
    """
    query, _, _, first_position, _ = rows
    highest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    weighted = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    # Without a window, every row attends to all of the tiles before this tile.
    masked_begin = tl.maximum(begin, tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N)
    highest, total, weighted = _attend_tiles(
        highest,
        total,
        weighted,
        rows,
        layer,
        begin,
        masked_begin,
        BLOCK_SIZE,
        VALUE_DIM,
        TAIL_DIM,
        BLOCK_N,
        VIEW,
        HAS_CAP,
        HAS_SLOPES,
        VIEW != "all",
    )
    return _attend_tiles(
        highest,
        total,
        weighted,
        rows,
        layer,
        masked_begin,
        end,
        BLOCK_SIZE,
        VALUE_DIM,
        TAIL_DIM,
        BLOCK_N,
        VIEW,
        HAS_CAP,
        HAS_SLOPES,
        True,
    )


@triton.jit
def _attend_tiles(
    highest,
    total,
    weighted,
    rows,
    layer,
    begin,
    end,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VIEW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    query, tail, positions, _, slopes = rows
    key_ptr, value_ptr, table_ptr, slot_stride, scale, window, softcap = layer
    columns = tl.arange(0, query.shape[1])
    for start in tl.range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_token = tokens < end
        blocks = _load(table_ptr + tokens // BLOCK_SIZE, is_token, IS_MASKED)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        token_places = (slots * slot_stride)[:, None]
        places = token_places + columns[None, :]
        is_read = is_token[:, None] & (columns < VALUE_DIM)[None, :]
        HAS_GAPS: tl.constexpr = IS_MASKED or query.shape[1] != VALUE_DIM
        keys = _load(key_ptr + places, is_read, HAS_GAPS)
        scores = tl.dot(query, keys.T, input_precision="tf32x3")
        if TAIL_DIM > 0:
            others = tl.arange(0, tail.shape[1])
            is_tail = is_token[:, None] & (others < TAIL_DIM)[None, :]
            tail_places = key_ptr + token_places + (VALUE_DIM + others)[None, :]
            tail_keys = _load(tail_places, is_tail, IS_MASKED or tail.shape[1] != TAIL_DIM)
            scores = tl.dot(tail, tail_keys.T, scores, input_precision="tf32x3")
        factor = scale
        if HAS_CAP:
            scores = softcap * _tanh(scores * (scale / softcap))
            factor = 1.0
        if HAS_SLOPES:
            distances = (tokens[None, :] - positions[:, None]).to(tl.float32)
            # Fused explicitly, so that masked and other tiles round the same sum.
            slopes_of_tile = slopes[:, None].broadcast_to(distances.shape)
            scores = tl.fma(distances, slopes_of_tile, scores * factor)
            factor = 1.0
        if IS_MASKED:
            is_visible = (tokens[None, :] <= positions[:, None]) & is_token[None, :]
            if VIEW != "all":
                first = first_visible(positions, window, VIEW)
                is_visible &= tokens[None, :] >= first[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        shift = _finite(new_highest)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        values = keys
        if TAIL_DIM == 0:
            values = _load(value_ptr + places, is_read, HAS_GAPS)
        weighted = tl.dot(
            weights.to(values.dtype), values, weighted * decay[:, None], input_precision="tf32x3"
        )
        highest = new_highest
    return highest, total, weighted


@triton.jit
def _tanh(x):
    """1 and -1 for numbers whose powers are infinite and zero."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _load(pointers, mask, IS_MASKED: tl.constexpr):
    """Load with zeros instead of masked elements: 0 * NaN would be NaN."""
    return tl.load(pointers, mask=mask, other=0) if IS_MASKED else tl.load(pointers)


@triton.jit
def merge_spans(highest, total, weighted, other_highest, other_total, other_weighted):
    """Merge the results of `attend_span` for two spans, in this order."""
    new_highest = tl.maximum(highest, other_highest)
    shift = _finite(new_highest)
    decay, other_decay = tl.exp2(highest - shift), tl.exp2(other_highest - shift)
    return (
        new_highest,
        # Fused explicitly, so that each kernel's compiler rounds the same product.
        tl.fma(total, decay, other_total * other_decay),
        tl.fma(
            weighted,
            decay[:, None].broadcast_to(weighted.shape),
            other_weighted * other_decay[:, None],
        ),
    )


@triton.jit
def _finite(highest):
    """Zero for -inf, the maximum of no scores: -inf - -inf would be NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def normalised(highest, total, weighted, sinks_ptr, heads, HAS_SINKS: tl.constexpr):
    """The attention of each row; zero for a row without visible tokens. A head's sink, a score of
    no token, takes part in the softmax."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads) * 1.4426950408889634
        total += tl.exp2(sinks - _finite(highest))
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]
