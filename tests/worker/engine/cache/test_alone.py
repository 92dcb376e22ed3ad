"""The blocks of a sequence that has the cache to itself."""

from worker.engine.cache.alone import BlocksAlone
from worker.engine.cache.layout import FullCache, StateCache, WindowCache


def test_groups_share_no_block_and_a_state_is_overwritten() -> None:
    groups = (FullCache(), StateCache(num_blocks=2, every=8), WindowCache(3))

    blocks = BlocksAlone(groups, block_size=4, num_tokens=11)

    assert blocks.num_blocks == 3 + 2 + 3
    assert list(map(list, blocks.of_step(0, 5))) == [[0, 1], [3, 4], [5, 6]]
    assert list(map(list, blocks.of_step(5, 11))) == [[0, 1, 2], [3, 4, 3, 4], [5, 6, 7]]
