"""Every tile of rows attends to every split of its context once, in few programs of equal work."""

from typing import Any, get_args

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_spec import AttentionSpec
from kernels.triton.attention_schedule import View, tile_of, work_of

GROUP, ALIGNMENT, MIN_SPLIT, BLOCK_M, BLOCK_S = 3, 4, 32, 16, 32


@triton.jit
def record_kernel(
    found_ptr,
    starts_ptr,
    lens_ptr,
    num_seqs,
    num_wanted,
    split_len,
    window,
    GROUP: tl.constexpr,
    VIEW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FIND: tl.constexpr,
):
    place = tl.program_id(0)
    seq, tile, split_or_item, num_splits, split_len, base = FIND(
        place,
        starts_ptr,
        lens_ptr,
        (num_seqs, num_wanted, split_len, window),
        GROUP=GROUP,
        VIEW=VIEW,
        ALIGNMENT=ALIGNMENT,
        MIN_SPLIT=MIN_SPLIT,
        BLOCK_M=BLOCK_M,
        BLOCK_S=BLOCK_S,
    )
    row = found_ptr + 6 * place
    tl.store(row, seq)
    tl.store(row + 1, tile)
    tl.store(row + 2, split_or_item)
    tl.store(row + 3, num_splits)
    tl.store(row + 4, split_len)
    tl.store(row + 5, base)


Sequence = tuple[int, int]
"""Earlier tokens and new tokens."""


def schedule(
    device: torch.device,
    sequences: list[Sequence],
    *,
    num_programs: int,
    num_wanted: int,
    split_len: int = 0,
    window: int = 0,
    view: View = "all",
    find: Any = work_of,
) -> list[list[int]]:
    """What each program finds that has work."""
    ends = torch.tensor([0] + [new for _, new in sequences]).cumsum(0).int()
    lens = torch.tensor([old + new for old, new in sequences]).int()
    found = torch.empty(num_programs, 6, dtype=torch.int32, device=device)
    record_kernel[(num_programs,)](
        found,
        ends.to(device),
        lens.to(device),
        len(sequences),
        num_wanted,
        split_len,
        window,
        GROUP=GROUP,
        VIEW=view,
        ALIGNMENT=ALIGNMENT,
        MIN_SPLIT=MIN_SPLIT,
        BLOCK_M=BLOCK_M,
        BLOCK_S=BLOCK_S,
        FIND=find,
    )
    return [work for work in found.tolist() if work[0] < len(sequences)]


def num_tiles(sequences: list[Sequence]) -> list[int]:
    return [-(-new * GROUP // BLOCK_M) for _, new in sequences]


@given(
    # Tiles and splits are small, so that few programs have several of both.
    sequences=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 14)), min_size=1, max_size=4),
    num_wanted=st.integers(1, 12),
    window=st.integers(1, 300),
    view=st.sampled_from(get_args(View)),
)
@settings(max_examples=20, deadline=None)
def test_the_splits_of_every_tile_cover_its_context_once(
    device: torch.device, sequences: list[Sequence], num_wanted: int, window: int, view: View
) -> None:
    tiles = num_tiles(sequences)
    # One program more than there may be, so that a schedule that is too long is found.
    bound = sum(tiles) + num_wanted
    seen: dict[str, Any] = {"num_wanted": num_wanted, "window": window, "view": view}
    works = schedule(device, sequences, num_programs=bound + 1, **seen)
    assert len(works) <= bound
    expected = []
    specs: dict[View, AttentionSpec] = {
        "all": AttentionSpec(scale=1.0),
        "window": AttentionSpec(scale=1.0, window=window),
        "chunk": AttentionSpec(scale=1.0, chunk=window),
    }
    for seq, (old, new) in enumerate(sequences):
        first = specs[view].first_visible(old)
        (split_len,) = {work[4] for work in works}
        base = first // ALIGNMENT * ALIGNMENT
        assert split_len % ALIGNMENT == 0
        num_splits = -(-(old + new - base) // split_len)
        expected += [
            [seq, tile, split, num_splits, split_len, base]
            for tile in reversed(range(tiles[seq]))
            for split in range(num_splits)
        ]
    assert works == expected
    first_items = {(work[0], work[1]): item for item, work in enumerate(works) if work[2] == 0}
    found = schedule(device, sequences, num_programs=sum(tiles) + 1, find=tile_of, **seen)
    assert {(seq, tile): item for seq, tile, item, *_ in found} == first_items
    assert len(found) == sum(tiles)


def test_one_long_context_among_short_ones_has_many_programs(device: torch.device) -> None:
    sequences = [(20, 1)] * 10 + [(3000, 1)]
    works = schedule(device, sequences, num_programs=32, num_wanted=20)
    assert sum(work[0] == 10 for work in works) > 15
    assert len(works) <= 31


def test_a_sequence_without_context_has_one_program(device: torch.device) -> None:
    works = schedule(
        device, [(-1, 1), (99, 1), (-1, 1)], num_programs=20, num_wanted=4, split_len=50
    )
    assert [work[:4] for work in works] == [[0, 0, 0, 1], [1, 0, 0, 2], [1, 0, 1, 2], [2, 0, 0, 1]]
