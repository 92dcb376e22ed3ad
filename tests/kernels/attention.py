"""Paged attention written out: a softmax for each token and head, in float64, over a cache of
NaN."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.providers import TILE_TOKENS
from tests.support.models.numerics import assert_close, poisoned

Attention: TypeAlias = Callable[..., Tensor]
MAX_RELATIVE_ERROR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """``context_lens[s]`` tokens in all, of which the last ``query_lens[s]`` attend."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_slopes: bool = False
    has_sinks: bool = False
    value_dim: int | None = None
    """The first elements of keys that are the values."""
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> AttentionSpec:
        sinks = torch.linspace(-1, 2, self.num_heads) if self.has_sinks else None
        slopes = torch.linspace(0.01, 0.7, self.num_heads) if self.has_slopes else None
        return AttentionSpec(
            scale=0.3,
            window=self.sliding_window,
            chunk=self.chunk,
            softcap=self.softcap,
            slopes=slopes,
            sinks=sinks,
            value_dim=self.value_dim,
        )


CASES = {
    "first token": Case((1,), (1,)),
    "decodes of odd lengths": Case((1, 7, 8, 9, 63, 64, 65, 131), (1,) * 8),
    "whole prompts": Case((5, 1, 17), (5, 1, 17)),
    "decodes and chunks": Case((40, 3, 33, 21), (1, 1, 9, 21)),
    "blocks of 32": Case((40, 3, 33), (1, 1, 9), block_size=32),
    "blocks of 1": Case((4, 3), (1, 3), block_size=1),
    "as many key heads": Case((19, 12), (1, 5), num_heads=3, num_kv_heads=3),
    "one key head": Case((19, 12), (1, 5), num_heads=3, num_kv_heads=1),
    "window": Case((200, 6, 5, 33, 12), (1, 1, 1, 9, 12), sliding_window=6),
    "window of 1": Case((9, 4), (1, 3), sliding_window=1),
    "heads of 80": Case((40, 3, 33), (1, 1, 9), head_dim=80),
    "heads of 128, groups of 4": Case((70, 33), (1, 9), 8, 2, head_dim=128),
    "bfloat16": Case((40, 3, 33, 21), (1, 1, 9, 21), dtype=torch.bfloat16),
    "chunked": Case((200, 6, 5, 33, 12), (1, 1, 1, 30, 12), chunk=8),
    "soft cap": Case((40, 3, 33, 21), (1, 1, 9, 21), softcap=0.7),
    "sinks": Case((40, 3, 33, 21), (1, 1, 9, 21), has_sinks=True),
    "slopes": Case((40, 3, 33, 21), (1, 1, 9, 21), has_slopes=True),
    "slopes in bfloat16": Case((40, 33), (1, 9), has_slopes=True, dtype=torch.bfloat16),
    "slopes after a soft cap": Case((40, 3, 33), (1, 1, 9), softcap=0.7, has_slopes=True),
    "latent vectors": Case((40, 3, 33, 21), (1, 1, 9, 21), 6, 1, head_dim=48, value_dim=32),
    "sinks behind a window": Case((40, 3, 33), (1, 1, 9), sliding_window=4, has_sinks=True),
}


TILE = max(TILE_TOKENS.values())


@dataclass(frozen=True)
class Tensors:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def build(case: Case) -> Tensors:
    """Lay the contexts out in shuffled blocks; every slot without a token stays NaN.

    So does the block that stands for the blocks behind a window, which no provider reads.
    """
    torch.manual_seed(2)
    size = case.block_size
    num_blocks = [-(-length // size) for length in case.context_lens]
    free = torch.randperm(sum(num_blocks) + 3).tolist()
    shape = (len(free), size, case.num_kv_heads, case.head_dim)
    caches = [poisoned(*shape, dtype=case.dtype) for _ in range(2)]
    nothing = free.pop()
    tables = torch.full((len(num_blocks), max(num_blocks)), nothing, dtype=torch.int32)
    contexts: list[list[Tensor]] = [[], []]
    for row, length in enumerate(case.context_lens):
        blocks = [free.pop() for _ in range(num_blocks[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        for cache, context in zip(caches, contexts, strict=True):
            context.append(torch.randn(length, *shape[2:]).to(case.dtype))
            slots = torch.arange(length)
            cache[tables[row, slots // size].long(), slots % size] = context[-1]
        first_read = case.spec.first_visible(length - case.query_lens[row])
        tables[row, : first_read // TILE * TILE // size] = nothing
    if case.value_dim is not None:
        caches[1] = caches[0]
        contexts[1] = [keys[..., : case.value_dim] for keys in contexts[0]]
    return Tensors(
        query=torch.randn(sum(case.query_lens), case.num_heads, case.head_dim).to(case.dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        query_starts=torch.tensor((0, *case.query_lens)).cumsum(0).int(),
        context_lens=torch.tensor(case.context_lens).int(),
        keys=contexts[0],
        values=contexts[1],
    )


def alone(case: Case, tensors: Tensors, row: int) -> tuple[Case, Tensors]:
    """The same case with this sequence alone."""
    start, end = tensors.query_starts[row : row + 2].tolist()
    only = replace(case, context_lens=case.context_lens[row : row + 1], query_lens=(end - start,))
    return only, replace(
        tensors,
        query=tensors.query[start:end],
        block_tables=tensors.block_tables[row : row + 1],
        query_starts=torch.tensor([0, end - start]).int(),
        context_lens=tensors.context_lens[row : row + 1],
        keys=tensors.keys[row : row + 1],
        values=tensors.values[row : row + 1],
    )


def attend(attention: Attention, case: Case, tensors: Tensors) -> Tensor:
    return attention(
        tensors.query,
        tensors.key_cache,
        tensors.value_cache,
        tensors.block_tables,
        tensors.query_starts,
        tensors.context_lens,
        num_decodes=leading_ones(case.query_lens),
        max_query_len=max(case.query_lens),
        spec=case.spec,
    )


def leading_ones(query_lens: tuple[int, ...]) -> int:
    return next((i for i, length in enumerate(query_lens) if length > 1), len(query_lens))


def naive(case: Case, tensors: Tensors) -> Tensor:
    rows = []
    for row, (context_len, query_len) in enumerate(
        zip(case.context_lens, case.query_lens, strict=True)
    ):
        start = sum(case.query_lens[:row])
        for i in range(query_len):
            end = context_len - query_len + i + 1
            begin = case.spec.first_visible(end - 1)
            heads = tensors.query[start + i].double()
            rows.append(
                torch.stack(
                    [
                        naive_head(
                            case.spec,
                            head,
                            heads[head],
                            tensors.keys[row][
                                begin:end, head * case.num_kv_heads // case.num_heads
                            ],
                            tensors.values[row][
                                begin:end, head * case.num_kv_heads // case.num_heads
                            ],
                        )
                        for head in range(case.num_heads)
                    ]
                )
            )
    return torch.stack(rows)


def naive_head(
    spec: AttentionSpec, head: int, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    scores = spec.scale * keys.double() @ query
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    if spec.slopes is not None:
        scores = scores + spec.slopes[head].double() * torch.arange(1 - len(keys), 1)
    weights = scores.exp()
    sink = 0.0 if spec.sinks is None else spec.sinks[head].double().exp()
    return weights @ values.double() / (weights.sum() + sink)


Fault = Callable[[Case, Tensors], tuple[Case, Tensors]]


def check(
    attention: Attention,
    case: Case,
    fault: Fault | None = None,
    max_relative_error: dict[torch.dtype, float] = MAX_RELATIVE_ERROR,
) -> None:
    """Simulate a fault in an op by passing wrong arguments to a correct op."""
    tensors = build(case)
    expected = naive(case, tensors)
    given = (case, tensors) if fault is None else fault(case, tensors)
    assert_close(attend(attention, *given), expected, max_relative_error[case.dtype])


FAULTS: dict[str, tuple[str, Fault]] = {
    "an unwritten slot is read": (
        "decodes of odd lengths",
        lambda case, given: (case, replace(given, context_lens=given.context_lens + 1)),
    ),
    "the first tokens are not seen": (
        "decodes of odd lengths",
        lambda case, given: (replace(case, sliding_window=130), given),
    ),
    "blocks of another sequence": (
        "decodes and chunks",
        lambda case, given: (case, replace(given, block_tables=given.block_tables.flip(0))),
    ),
    "blocks in the wrong order": (
        "whole prompts",
        lambda case, given: (case, replace(given, block_tables=given.block_tables[:, [1, 0, 2]])),
    ),
    "the window is one token short": (
        "window",
        lambda case, given: (replace(case, sliding_window=5), given),
    ),
    "distances do not count": (
        "slopes",
        lambda case, given: (replace(case, has_slopes=False), given),
    ),
    "other heads share keys": (
        "decodes and chunks",
        lambda case, given: (
            case,
            replace(
                given, key_cache=given.key_cache.flip(2), value_cache=given.value_cache.flip(2)
            ),
        ),
    ),
}
