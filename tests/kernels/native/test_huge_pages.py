"""Memory is committed before it is needed, but not much sooner."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native.huge_pages import CommittedAhead, allocate
from kernels.native.library import library

NUM_LAYERS = 3
LAYER_BYTES = 21 << 20
AHEAD_BYTES = 8 << 20
PIECE_BYTES = 2 << 20
SLACK_BYTES = NUM_LAYERS * PIECE_BYTES
"""Huge pages may exceed what was requested."""


@pytest.fixture
def cache() -> Tensor:
    return allocate(NUM_LAYERS * LAYER_BYTES).view(NUM_LAYERS, LAYER_BYTES)


def resident_bytes(cache: Tensor) -> int:
    """The resident bytes of the mapping that contains ``cache``."""
    start, is_ours = cache.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            first, last = (int(address, 16) for address in name.split("-"))
            is_ours = first <= start < last
        elif is_ours and name == "Rss:":
            return int(values[0]) * 1024
    raise AssertionError("there is no such mapping")


def committed(cache: Tensor, *uses: int) -> int:
    """The additional committed memory after this many bytes of each layer were used."""
    before = resident_bytes(cache)
    ahead = CommittedAhead(library(), cache)
    for use in uses:
        thread = ahead.use(use)
        assert thread is not None
        thread.join()
    return resident_bytes(cache) - before


def test_what_comes_next_is_there_and_no_more(cache: Tensor) -> None:
    num_bytes = committed(cache, 0, 5 << 20)

    wanted = NUM_LAYERS * ((5 << 20) + AHEAD_BYTES)
    assert wanted <= num_bytes <= wanted + NUM_LAYERS * PIECE_BYTES + SLACK_BYTES


def test_a_layers_end_is_the_last_that_is_committed(cache: Tensor) -> None:
    assert committed(cache, LAYER_BYTES - 1) >= NUM_LAYERS * LAYER_BYTES


def test_a_step_within_what_is_there_starts_nothing(cache: Tensor) -> None:
    ahead = CommittedAhead(library(), cache)

    has_started = [ahead.use(use) is not None for use in (0, 0, 1, 2, PIECE_BYTES, PIECE_BYTES + 1)]

    assert has_started == [True, False, True, False, False, True]


def test_content_stays(cache: Tensor) -> None:
    cache[:, :100] = torch.arange(100, dtype=torch.uint8)

    committed(cache, LAYER_BYTES)

    assert (cache[:, :100] == torch.arange(100, dtype=torch.uint8)).all()
    assert not cache[:, 100:].any()
