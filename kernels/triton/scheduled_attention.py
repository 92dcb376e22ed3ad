"""Attention of sequences of any lengths: decodes, and chunks of prompts.

FlashAttention-2 (Dao, arXiv:2307.08691) over packed chunks, whose contexts are split into programs
of about equal work (see `kernels.triton.attention_schedule`); a second kernel merges the splits. A
chunk of n tokens at the end of a context of c costs 4 * num_heads * head_dim * n * (c - (n - 1) /
2) FLOPs. The minimum traffic is the chunk's queries and results, 2 * n * num_heads * head_dim
elements, and the context's keys and values once, 2 * c * num_kv_heads * head_dim; later tiles of
rows find them in the L2 cache. A split writes and reads back (head_dim + 2) * 4 bytes for each row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.triton.attention_schedule import View, tile_of, tile_span, work_of
from kernels.triton.attention_span import (
    LOG2_E,
    attend_span,
    layer_of,
    merge_spans,
    normalised,
)
from kernels.triton.attention_tiles import (
    AttentionKind,
    Tile,
    decode_tile,
    num_multiprocessors,
    prefill_tile,
)
from kernels.triton.configurations import TARGETS, Configuration, Constexpr, launch

INVARIANT_SPLIT_LEN = 512
"""Tokens per split in batch-invariant mode, in which splits must not depend on the batch."""
_MIN_SPLIT_LEN = 128
_UNSPLIT = 1 << 30
_MERGED_SPLITS = 32
_MAX_GRID = 32768
"""CUDA allows 65,535 programs in the second dimension of a grid."""
BLOCK_SEQS = (32, 1024)
"""The most sequences that a kernel is compiled for; see `worker.model.warm_up`."""

# Programs that run at a time on a multiprocessor.
_NUM_DECODES, _NUM_CHUNKS, _NUM_MERGES = 4, 1, 4


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_wanted", "split_len", "table_stride", "window"]
)
def attention_kernel(
    out_ptr,
    weighted_ptr,
    highest_ptr,
    total_ptr,
    sinks_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    slopes_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    first_seq,
    num_seqs,
    num_wanted,
    split_len,
    query_stride,
    out_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SPAN_LEN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    """Program (key head, item of the schedule): a tile of BLOCK_M rows, tokens times heads of the
    group, attends to a split of its context.

    The result of a tile with several splits goes to ``weighted`` [items, key heads, STORED_ROWS,
    VALUE_DIM], ``highest`` and ``total``; with IS_WHOLE no tile has several. With a SPAN_LEN, spans
    of this length are merged in the way in which `merge_splits_kernel` merges splits.
    """
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    item = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    index, tile, split, num_splits, split_len, base = work_of(
        item,
        starts_ptr + first_seq,
        lens_ptr + first_seq,
        (num_seqs, num_wanted, split_len, window),
        GROUP,
        VIEW,
        ALIGNMENT,
        MIN_SPLIT,
        BLOCK_M,
        BLOCK_S,
    )
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
    if index >= num_seqs:
        return
    seq = first_seq + index
    start = tl.load(starts_ptr + seq)
    num_tokens = tl.load(starts_ptr + seq + 1) - start
    context_len = tl.load(lens_ptr + seq)
    tile_begin, tile_end, first_position = tile_span(
        tile, context_len, num_tokens, window, GROUP, VIEW, BLOCK_M, BLOCK_N
    )
    begin = tl.maximum(base + split * split_len, tile_begin) // BLOCK_N * BLOCK_N
    end = tl.minimum(base + (split + 1) * split_len, tile_end)
    # An only split is stored even if it is empty.
    if begin >= end and num_splits > 1:
        return
    rows, columns = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, heads = (start + rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP
    is_row, is_column = rows < num_tokens * GROUP, columns < VALUE_DIM
    is_place = is_row[:, None] & is_column[None, :]
    head_ptr = query_ptr + (tokens * query_stride + heads * HEAD_DIM)[:, None]
    query = tl.load(head_ptr + columns[None, :], mask=is_place, other=0.0)
    tail = query
    if TAIL_DIM > 0:
        others = tl.arange(0, BLOCK_T)
        is_tail = is_row[:, None] & (others < TAIL_DIM)[None, :]
        tail = tl.load(head_ptr + (VALUE_DIM + others)[None, :], mask=is_tail, other=0.0)
    layer = layer_of(
        seq,
        key_ptr,
        value_ptr,
        tables_ptr,
        slot_stride,
        table_stride,
        scale,
        window,
        softcap,
        HEAD_DIM,
    )
    positions = context_len - num_tokens + rows // GROUP
    slopes = positions
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + heads) * 1.4426950408889634
    query_rows = (query, tail, positions, first_position, slopes)
    if SPAN_LEN == 0:
        highest, total, weighted = attend_span(
            query_rows,
            layer,
            begin,
            end,
            BLOCK_SIZE=BLOCK_SIZE,
            VALUE_DIM=VALUE_DIM,
            TAIL_DIM=TAIL_DIM,
            BLOCK_N=BLOCK_N,
            VIEW=VIEW,
            HAS_CAP=HAS_CAP,
            HAS_SLOPES=HAS_SLOPES,
        )
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for span in tl.range(begin // SPAN_LEN, tl.cdiv(end, SPAN_LEN)):
            span_highest, span_total, span_weighted = attend_span(
                query_rows,
                layer,
                tl.maximum(begin, span * SPAN_LEN),
                tl.minimum(end, (span + 1) * SPAN_LEN),
                BLOCK_SIZE,
                VALUE_DIM,
                TAIL_DIM,
                BLOCK_N,
                VIEW,
                HAS_CAP=HAS_CAP,
                HAS_SLOPES=HAS_SLOPES,
            )
            highest, total, weighted = merge_spans(
                highest, total, weighted, span_highest, span_total, span_weighted
            )
    if IS_WHOLE or num_splits == 1:
        out = normalised(highest, total, weighted, sinks_ptr, heads, HAS_SINKS)
        out = out.to(out_ptr.dtype.element_ty)
        out_places = (tokens * out_stride + heads * VALUE_DIM)[:, None] + columns[None, :]
        tl.store(out_ptr + out_places, out, mask=is_place)
    else:
        stored = tl.arange(0, BLOCK_M)
        is_stored = is_row & (stored < STORED_ROWS)
        parts = (item.to(tl.int64) * tl.num_programs(0) + kv_head) * STORED_ROWS + stored
        tl.store(highest_ptr + parts, highest, mask=is_stored)
        tl.store(total_ptr + parts, total, mask=is_stored)
        part_places = parts[:, None] * VALUE_DIM + columns[None, :]
        is_part = is_stored[:, None] & is_column[None, :]
        tl.store(weighted_ptr + part_places, weighted, mask=is_part)


@triton.jit(
    do_not_specialize=[
        "first_seq",
        "num_seqs",
        "num_wanted",
        "split_len",
        "num_kv_heads",
        "rows_a_program",
        "window",
    ]
)
def merge_splits_kernel(
    out_ptr,
    weighted_ptr,
    highest_ptr,
    total_ptr,
    sinks_ptr,
    starts_ptr,
    lens_ptr,
    first_seq,
    num_seqs,
    num_wanted,
    split_len,
    num_kv_heads,
    rows_a_program,
    out_stride,
    window,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    """Program (part of the rows of all key heads, tile): merge the splits of each row, if there are
    several, from the first to the last, BLOCK_K at a time."""
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    index, tile, item, num_splits, split_len, base = tile_of(
        tl.program_id(1),
        starts_ptr + first_seq,
        lens_ptr + first_seq,
        (num_seqs, num_wanted, split_len, window),
        GROUP,
        VIEW,
        ALIGNMENT,
        MIN_SPLIT,
        BLOCK_M,
        BLOCK_S,
    )
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
    if index >= num_seqs or num_splits == 1:
        return
    seq = first_seq + index
    start = tl.load(starts_ptr + seq)
    num_tokens = tl.load(starts_ptr + seq + 1) - start
    begin, end, _ = tile_span(
        tile,
        tl.load(lens_ptr + seq),
        num_tokens,
        window,
        GROUP,
        VIEW,
        BLOCK_M,
        BLOCK_N,
    )
    first, last = tl.maximum(begin - base, 0) // split_len, tl.cdiv(end - base, split_len)
    columns = tl.arange(0, BLOCK_D)[None, :]
    is_column = columns < VALUE_DIM
    first_row = tl.program_id(0) * rows_a_program
    last_row = tl.minimum(first_row + rows_a_program, num_kv_heads * STORED_ROWS)
    for stored in tl.range(first_row, last_row):
        kv_head, row = stored // STORED_ROWS, tile * BLOCK_M + stored % STORED_ROWS
        is_row = row < num_tokens * GROUP
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        weighted = tl.zeros([1, BLOCK_D], tl.float32)
        for split in tl.range(first, tl.where(is_row, last, first), BLOCK_K):
            others = split + tl.arange(0, BLOCK_K)
            is_split = others < last
            parts = (item + others).to(tl.int64) * (num_kv_heads * STORED_ROWS) + stored
            split_highest = tl.load(highest_ptr + parts, mask=is_split, other=float("-inf"))
            split_total = tl.load(total_ptr + parts, mask=is_split, other=0.0)
            split_weighted = tl.load(
                weighted_ptr + parts[:, None] * VALUE_DIM + columns,
                mask=is_split[:, None] & is_column,
                other=0.0,
            )
            highest, total, weighted = merge_spans(
                highest, total, weighted, *_merged(split_highest, split_total, split_weighted)
            )
        head = kv_head * GROUP + row % GROUP
        out = normalised(highest, total, weighted, sinks_ptr, head, HAS_SINKS)
        out = out.to(out_ptr.dtype.element_ty)
        place = (start + row // GROUP).to(tl.int64) * out_stride + head * VALUE_DIM
        tl.store(out_ptr + place + columns, out, mask=is_row & is_column)


@triton.jit
def _merged(highest, total, weighted):
    """Merge the splits of a row, [splits] and [splits, columns]; a single split keeps its very
    bits."""
    most = tl.max(highest, 0, keep_dims=True)
    shares = tl.exp2(highest - tl.where(most == float("-inf"), 0.0, most))
    return (
        most,
        tl.sum(total * shares, 0, keep_dims=True),
        tl.sum(weighted * shares[:, None], 0, keep_dims=True),
    )


@dataclass(frozen=True, slots=True)
class Sequences:
    """A step's sequences from ``first`` to ``end - 1``, which have ``num_tokens`` new tokens in all
    and at most ``max_query_len`` each."""

    first: int
    end: int
    num_tokens: int
    max_query_len: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Variant:
    """The facts for which the kernels are compiled, beside the kind of layer."""

    tile: Tile
    is_decode: bool
    is_whole: bool
    """Whether no context is split."""
    is_batch_invariant: bool

    @property
    def span_len(self) -> int:
        return INVARIANT_SPLIT_LEN if self.is_batch_invariant else 0

    @property
    def alignment(self) -> int:
        """Splits begin at a multiple of this."""
        return self.span_len or self.tile.keys

    def stored_rows(self, kind: AttentionKind) -> int:
        return min(kind.group, self.tile.rows) if self.is_decode else self.tile.rows


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the attention of some sequences is divided, which depends on shapes alone."""

    variant: Variant
    num_tiles: int
    """The maximum number of tiles, for any lengths."""
    num_items: int
    """The maximum number of items, for any lengths."""
    num_wanted: int
    split_len: int
    """Zero: chosen on the device."""


def schedule_of(
    kind: AttentionKind,
    sequences: Sequences,
    num_kv_heads: int,
    max_context_len: int,
    window: int | None,
    device: torch.device,
    *,
    is_batch_invariant: bool,
) -> Schedule:
    """``max_context_len`` is that of the block table, ``window`` the length of a window or of a
    chunk."""
    is_decode = sequences.max_query_len == 1
    # In batch-invariant mode sums depend on the tile.
    if is_decode or is_batch_invariant:
        tile = decode_tile(kind, is_batch_invariant=is_batch_invariant)
    else:
        tile = prefill_tile(kind)
    a_multiprocessor = _NUM_DECODES if is_decode else _NUM_CHUNKS
    num_wanted = -(-a_multiprocessor * num_multiprocessors(device) // num_kv_heads)
    num_tiles = len(sequences) * (-(-kind.group // tile.rows) if is_decode else 1)
    if not is_decode:
        num_tiles += sequences.num_tokens * kind.group // tile.rows
    # Chunks of an invariant batch merge their spans in a single program, and many chunks fill the
    # device without splits, whose results would take much memory.
    is_whole = not is_decode and (is_batch_invariant or num_tiles >= num_wanted)
    variant = Variant(tile, is_decode, is_whole, is_batch_invariant)
    if is_whole:
        return Schedule(variant, num_tiles, num_tiles, num_wanted, _UNSPLIT)
    if window is not None:
        visible = window + sequences.max_query_len - 1 + variant.alignment
        max_context_len = min(max_context_len, visible)
    num_items = num_tiles * -(-max_context_len // (variant.span_len or _MIN_SPLIT_LEN))
    if not is_batch_invariant:
        num_items = min(num_items, num_tiles + num_wanted)
    return Schedule(variant, num_tiles, num_items, num_wanted, variant.span_len)


def attend(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    sequences: Sequences,
    *,
    spec: AttentionSpec,
    is_batch_invariant: bool,
) -> None:
    """Write the attention of some sequences to their rows of ``out``, which is contiguous.

    Otherwise as in `kernels.reference.paged_attention`.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    kind, window = AttentionKind.of(query, key_cache, spec), spec.chunk or spec.window
    schedule = schedule_of(
        kind,
        sequences,
        num_kv_heads,
        block_tables.shape[1] * kind.block_size,
        window,
        query.device,
        is_batch_invariant=is_batch_invariant,
    )
    variant, stored_rows = schedule.variant, schedule.variant.stored_rows(kind)
    num_parts = 0 if variant.is_whole else schedule.num_items * num_kv_heads * stored_rows
    # Two allocations, because Triton compiles again for an address that is no multiple of 16.
    highest = query.new_empty(num_parts, dtype=torch.float32)
    total = torch.empty_like(highest)
    weighted = query.new_empty(num_parts, kind.value_dim, dtype=torch.float32)
    # An argument that is not read.
    slopes, sinks = (highest if one is None else one for one in (spec.slopes, spec.sinks))
    work = (sequences.first, len(sequences), schedule.num_wanted, schedule.split_len)
    block_seqs = _block_seqs(len(sequences))
    launch(
        attend_configuration(kind, variant, block_seqs),
        (num_kv_heads, min(schedule.num_items, _MAX_GRID), -(-schedule.num_items // _MAX_GRID)),
        out,
        weighted,
        highest,
        total,
        sinks,
        query,
        key_cache,
        value_cache,
        slopes,
        block_tables,
        query_starts,
        context_lens,
        *work,
        query.stride(0),
        out.stride(0),
        num_kv_heads * head_dim,
        block_tables.stride(0),
        spec.scale * LOG2_E,
        window or 0,
        (spec.softcap or 0.0) * LOG2_E,
    )
    if not variant.is_whole:
        num_rows = num_kv_heads * stored_rows
        num_programs = _NUM_MERGES * num_multiprocessors(query.device)
        rows_a_program = -(-num_rows * schedule.num_tiles // num_programs)
        launch(
            merge_configuration(kind, variant, block_seqs),
            (-(-num_rows // rows_a_program), schedule.num_tiles),
            out,
            weighted,
            highest,
            total,
            sinks,
            query_starts,
            context_lens,
            *work,
            num_kv_heads,
            rows_a_program,
            out.stride(0),
            window or 0,
        )


@cache
def _block_seqs(num_seqs: int) -> int:
    fitting = (size for size in BLOCK_SEQS if size >= num_seqs)
    return next(fitting, int(triton.next_power_of_2(num_seqs)))


@cache
def attend_configuration(kind: AttentionKind, variant: Variant, block_seqs: int) -> Configuration:
    tile = variant.tile
    return Configuration(
        kernel=attention_kernel,
        signature={**_splits_signature(kind), **kind.signature},
        constexprs={
            **_schedule_constexprs(kind, variant, block_seqs),
            "HEAD_DIM": kind.head_dim,
            "TAIL_DIM": kind.tail_dim,
            "BLOCK_T": kind.tail_width,
            "HAS_CAP": kind.has_cap,
            "HAS_SLOPES": kind.has_slopes,
            "BLOCK_SIZE": kind.block_size,
            "IS_WHOLE": variant.is_whole,
            "SPAN_LEN": variant.span_len,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=kind.targets if variant.is_decode else (kind.target,),
    )


@cache
def merge_configuration(kind: AttentionKind, variant: Variant, block_seqs: int) -> Configuration:
    return Configuration(
        kernel=merge_splits_kernel,
        signature={
            **_splits_signature(kind),
            "lens_ptr": "*i32:16",
            **dict.fromkeys(("num_kv_heads", "rows_a_program", "window"), "i32"),
        },
        constexprs={
            **_schedule_constexprs(kind, variant, block_seqs),
            # The spans of chunks are merged one after the other, so the splits of decodes are, too.
            "BLOCK_K": 1 if variant.is_batch_invariant else _MERGED_SPLITS,
        },
        targets=kind.targets,
    )


def _splits_signature(kind: AttentionKind) -> dict[str, str]:
    """The types of the arguments that both kernels have and other kernels lack."""
    return {
        "out_ptr": kind.pointer,
        **dict.fromkeys(("weighted_ptr", "highest_ptr", "total_ptr", "sinks_ptr"), "*fp32:16"),
        "starts_ptr": "*i32:16",
        **dict.fromkeys(("first_seq", "num_seqs", "num_wanted", "split_len"), "i32"),
        "out_stride": "i32:16",
    }


def _schedule_constexprs(
    kind: AttentionKind, variant: Variant, block_seqs: int
) -> dict[str, Constexpr]:
    return {
        "VALUE_DIM": kind.value_dim,
        "GROUP": kind.group,
        "VIEW": kind.view,
        "HAS_SINKS": kind.has_sinks,
        "ALIGNMENT": variant.alignment,
        "MIN_SPLIT": _MIN_SPLIT_LEN,
        "STORED_ROWS": variant.stored_rows(kind),
        "BLOCK_M": variant.tile.rows,
        "BLOCK_N": variant.tile.keys,
        "BLOCK_D": kind.width,
        "BLOCK_S": block_seqs,
        "HAS_PDL": kind.has_pdl,
    }


def _configurations() -> Iterator[Configuration]:
    layers: list[tuple[int, int, View]] = [(64, 3, "all"), (128, 4, "all"), (256, 4, "window")]
    for target in TARGETS:
        for head_dim, group, view in layers:
            has_pdl = target > TARGETS[0]
            kind = AttentionKind(torch.bfloat16, head_dim, group, 16, view, target, has_pdl)
            chunks = Variant(prefill_tile(kind), False, False, False)
            yield attend_configuration(kind, replace(chunks, is_whole=True), BLOCK_SEQS[-1])
            # The tile of decodes is the same for all targets.
            decodes = Variant(decode_tile(kind, is_batch_invariant=False), True, False, False)
            for variant in (chunks, decodes) if target < TARGETS[-1] else (chunks,):
                yield attend_configuration(kind, variant, BLOCK_SEQS[-1])
                yield merge_configuration(kind, variant, BLOCK_SEQS[-1])
    sinks = AttentionKind(torch.bfloat16, 64, 8, 16, "window", 90, has_pdl=True, has_sinks=True)
    decodes = Variant(decode_tile(sinks, is_batch_invariant=False), True, False, False)
    yield attend_configuration(sinks, decodes, BLOCK_SEQS[-1])
    yield merge_configuration(sinks, decodes, BLOCK_SEQS[-1])
    cap = AttentionKind(torch.bfloat16, 256, 2, 16, "chunk", 90, has_pdl=True, has_cap=True)
    chunk = Variant(prefill_tile(cap), False, True, False)
    yield attend_configuration(cap, chunk, BLOCK_SEQS[-1])
    slopes = AttentionKind(torch.bfloat16, 128, 1, 16, "all", 90, has_pdl=True, has_slopes=True)
    chunk = Variant(prefill_tile(slopes), False, True, False)
    yield attend_configuration(slopes, chunk, BLOCK_SEQS[-1])
    single = AttentionKind(torch.float32, 128, 1, 32, "all", 90, has_pdl=True)
    chunk = Variant(prefill_tile(single), False, True, False)
    yield attend_configuration(single, chunk, BLOCK_SEQS[-1])
    for target in TARGETS[:2]:
        for head_dim, group, tail_dim in ((512, 8, 0), (576, 20, 64), (576, 128, 64)):
            wide = AttentionKind(
                torch.bfloat16, head_dim, group, 16, "all", target, target > 80, tail_dim=tail_dim
            )
            chunk = Variant(prefill_tile(wide), False, True, False)
            yield attend_configuration(wide, chunk, BLOCK_SEQS[-1])
            if target == TARGETS[1]:
                decodes = Variant(decode_tile(wide, is_batch_invariant=False), True, False, False)
                yield attend_configuration(wide, decodes, BLOCK_SEQS[-1])
                yield merge_configuration(wide, decodes, BLOCK_SEQS[-1])
    half = AttentionKind(torch.float16, 128, 4, 16, "all", 90, has_pdl=True)
    for kind, is_decode in ((half, False), (single, True)):
        tile = decode_tile(kind, is_batch_invariant=True)
        variant = Variant(tile, is_decode, not is_decode, True)
        yield attend_configuration(kind, variant, BLOCK_SEQS[-1])


CONFIGURATIONS = tuple(_configurations())
