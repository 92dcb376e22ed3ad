"""Triton's paged attention: splits, chunks and windows; in the interpreter if there is no GPU."""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.providers import TILE_TOKENS
from kernels.triton.attention_tiles import AttentionKind
from kernels.triton.paged_attention import paged_attention
from kernels.triton.scheduled_attention import CONFIGURATIONS, Sequences, schedule_of
from tests.kernels.attention import CASES, FAULTS, Attention, Case, alone, attend, build, check
from tests.kernels.attention import MAX_RELATIVE_ERROR as INTERPRETED_ERROR

SPLIT = Case((1100, 300, 3), (1, 1, 1), num_heads=3, num_kv_heads=1, head_dim=32)
"""Splits of at least 128 tokens, or of 512: several, a single full split, and a part of a split."""
INTERPRETED = {
    **{name: case for name, case in CASES.items() if case.dtype != torch.bfloat16},
    "splits": SPLIT,
    "splits behind a window": replace(SPLIT, sliding_window=700),
    "splits with sinks and a soft cap": replace(SPLIT, softcap=2.0, has_sinks=True),
    "splits with slopes": replace(SPLIT, has_slopes=True),
    "chunks over several splits": Case((1100, 530), (6, 5), 2, 1, sliding_window=600),
    "splits of one long context": Case((1100, *[9] * 7), (1,) * 8, 4, 2),
    "splits of a chunk": Case((300, 900), (1, 9), 2, 1),
    "splits of a chunk behind a window": Case((30, 900), (2, 9), 2, 1, sliding_window=400),
    "splits of chunks": Case((900, 30), (1, 9), 2, 1, chunk=400),
    "latent vectors, more heads than a tile has rows": Case(
        (300, 20), (1, 9), 20, 1, head_dim=528, value_dim=512
    ),
    "heads of 512": Case((40, 33), (1, 9), head_dim=512, dtype=torch.float16),
    "heads of 96 in float16": Case((40, 33), (1, 9), head_dim=96, dtype=torch.float16),
    "splits in float16": replace(SPLIT, dtype=torch.float16, block_size=16),
    "more heads a key than a tile has rows": Case((9, 5), (1, 3), 20, 1),
}


MAX_RELATIVE_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""On a GPU, float32 products use three products of shorter numbers, and exp2 is approximate."""


@pytest.fixture
def max_error(device: torch.device) -> dict[torch.dtype, float]:
    return MAX_RELATIVE_ERROR if device.type == "cuda" else INTERPRETED_ERROR


@pytest.fixture
def fast(device: torch.device) -> Attention:
    return on(device, paged_attention)


@pytest.fixture
def invariant(device: torch.device) -> Attention:
    return on(device, partial(paged_attention, is_batch_invariant=True))


def on(device: torch.device, attention: Attention) -> Attention:
    def attend_there(*tensors: Tensor, spec: AttentionSpec, **options: Any) -> Tensor:
        sinks, slopes = (
            None if one is None else one.to(device) for one in (spec.sinks, spec.slopes)
        )
        there = (tensor.to(device) for tensor in tensors)
        return attention(*there, spec=replace(spec, sinks=sinks, slopes=slopes), **options).cpu()

    return attend_there


@pytest.mark.parametrize("name", INTERPRETED)
def test_agrees_with_float64(
    fast: Attention, name: str, max_error: dict[torch.dtype, float]
) -> None:
    check(fast, INTERPRETED[name], max_relative_error=max_error)


@pytest.mark.parametrize("name", [name for name in INTERPRETED if "splits" in name])
def test_agrees_with_float64_where_splits_are_fixed(
    invariant: Attention, name: str, max_error: dict[torch.dtype, float]
) -> None:
    check(invariant, INTERPRETED[name], max_relative_error=max_error)


@pytest.mark.parametrize(("query_len", "is_whole"), [(9, False), (90, True)])
def test_few_chunks_after_long_contexts_are_split(query_len: int, is_whole: bool) -> None:
    """In the interpreter, which passes for a device with four multiprocessors."""
    query, cache = torch.ones(query_len, 2, 16), torch.ones(1, 8, 1, 16)
    schedule = schedule_of(
        AttentionKind.of(query, cache, AttentionSpec(scale=1.0)),
        Sequences(0, 1, query_len, query_len),
        num_kv_heads=1,
        max_context_len=900,
        window=None,
        device=query.device,
        is_batch_invariant=False,
    )
    assert schedule.variant.is_whole == is_whole


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fast: Attention, fault: str) -> None:
    case, plant = FAULTS[fault]
    with pytest.raises(AssertionError, match="relative error"):
        check(fast, CASES[case], plant)


@pytest.mark.parametrize(
    "kind", [{}, {"sliding_window": 520}, {"has_slopes": True}], ids=["all", "window", "slopes"]
)
def test_a_tokens_bits_do_not_depend_on_its_company_nor_on_its_chunk(
    invariant: Attention, device: torch.device, kind: dict[str, Any]
) -> None:
    case = Case((530, 3, 1030, 20), (1, 1, 7, 20), 2, 1, **kind)
    # Eight tokens fill a tile. The interpreter's products come from a library that sums a tile's
    # later rows in another order than its first.
    step = 1 if device.type == "cuda" else 8
    tensors = build(case)
    together = attend(invariant, case, tensors)
    for row in range(len(case.context_lens)):
        start, end = tensors.query_starts[row : row + 2].tolist()
        only, given = alone(case, tensors, row)
        assert torch.equal(attend(invariant, only, given), together[start:end])
        for token in range(start, end, step):
            length = case.context_lens[row] - (end - 1 - token)
            decode = replace(only, context_lens=(length,), query_lens=(1,))
            context = replace(
                given,
                query=tensors.query[token : token + 1],
                query_starts=torch.tensor([0, 1]).int(),
                context_lens=torch.tensor([length]).int(),
            )
            assert torch.equal(attend(invariant, decode, context)[0], together[token])


def test_tiles_of_tokens_begin_where_caches_keep_them() -> None:
    sizes = {configuration.constexprs["BLOCK_N"] for configuration in CONFIGURATIONS}
    assert sizes
    assert all(isinstance(n, int) and TILE_TOKENS["triton"] % n == 0 for n in sizes)


@pytest.mark.parametrize("num_blocks", [3, 300])
def test_a_sequence_without_context_gets_zeros_and_reads_no_block(
    fast: Attention, num_blocks: int
) -> None:
    """In a narrow table of blocks, and in a wide table."""
    case = Case((5, 7), (1, 1))
    tensors = build(case)
    expected = attend(fast, case, tensors)
    tables = torch.full((3, num_blocks), -(2**31), dtype=torch.int32)
    tables[:2, :1] = tensors.block_tables
    padded = replace(
        tensors,
        query=torch.cat((tensors.query, torch.full_like(tensors.query[:1], torch.nan))),
        block_tables=tables,
        query_starts=torch.arange(4).int(),
        context_lens=torch.tensor([5, 7, 0]).int(),
    )

    out = attend(fast, replace(case, query_lens=(1, 1, 1)), padded)

    assert torch.equal(out, torch.cat((expected, torch.zeros_like(expected[:1]))))


def test_queries_may_be_a_part_of_a_fused_projection(fast: Attention, device: torch.device) -> None:
    case = CASES["decodes and chunks"]
    tensors = build(case)
    fused = torch.cat((tensors.query, tensors.query.new_full((32, 4, 16), torch.nan)), dim=1)
    apart = replace(tensors, query=fused.to(device)[:, :6])
    assert torch.equal(attend(fast, case, apart), attend(fast, case, tensors))


def test_what_the_kernels_cannot_read_is_refused() -> None:
    case = CASES["first token"]
    given = build(case)
    for change, message in (
        ({"query": given.query.double()}, "query of torch.float64, expected bfloat16"),
        ({"query": given.query.half()}, "query of torch.float16, key_cache of torch.float32"),
        ({"query": torch.ones(1, 16, 6).transpose(1, 2)}, r"query has strides \(96, 1, 6\)"),
        ({"block_tables": given.block_tables.long()}, "indices of torch.int64"),
        ({"key_cache": given.key_cache.repeat(2, 1, 1, 1)[::2]}, "expected contiguous elements"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(paged_attention, case, replace(given, **change))  # type: ignore[arg-type]
    odd = Case((1,), (1,), head_dim=24)
    with pytest.raises(ValueError, match="head_dim 24, expected a multiple of 16 up to 512"):
        attend(paged_attention, odd, build(odd))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_agrees_with_float64_on_a_gpu(
    device: torch.device, is_batch_invariant: bool, head_dim: int, dtype: torch.dtype
) -> None:
    attention = on(device, partial(paged_attention, is_batch_invariant=is_batch_invariant))
    shapes = list(product((16, 32), (None, 50), ((6, 2), (3, 3), (16, 1))))
    # The kernels of one shape take seconds to compile.
    chosen = random.Random(f"{is_batch_invariant} {head_dim} {dtype}").sample(shapes, 2)
    for block_size, window, heads in chosen:
        case = Case(
            (1, 700, 64, 129, 300, 200), (1, 1, 1, 1, 150, 200), *heads, head_dim, block_size
        )
        case = replace(case, sliding_window=window, dtype=dtype)
        check(attention, case, max_relative_error=MAX_RELATIVE_ERROR)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("num_heads", [20, 128])
def test_latent_vectors_agree_with_float64_on_a_gpu(
    fast: Attention, num_heads: int, dtype: torch.dtype
) -> None:
    lens = (1, 700, 64, 129, 300), (1, 1, 1, 1, 150)
    case = Case(*lens, num_heads, 1, head_dim=576, value_dim=512, block_size=16, dtype=dtype)
    check(fast, case, max_relative_error=MAX_RELATIVE_ERROR)


@pytest.mark.gpu
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_cuda_graph_holds_for_other_contexts(
    device: torch.device, is_batch_invariant: bool
) -> None:
    case = Case((900, 5, 300), (1, 1, 1), 8, 2, 128, 16, dtype=torch.bfloat16)
    tensors = build(case)
    op: Attention = partial(paged_attention, is_batch_invariant=is_batch_invariant)
    short = torch.tensor([1, 1, 1], dtype=torch.int32, device=device)
    held = [t.to(device) for t in (tensors.query, tensors.key_cache, tensors.value_cache)]
    tables, starts = tensors.block_tables.to(device), tensors.query_starts.to(device)
    options: dict[str, Any] = {"num_decodes": 3, "max_query_len": 1, "spec": case.spec}
    op(*held, tables, starts, short, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*held, tables, starts, short, **options)

    short.copy_(tensors.context_lens)
    graph.replay()

    assert torch.equal(out.cpu(), attend(on(device, op), case, tensors))
