import pytest

from worker.engine.block_pool import BlockPool


def test_allocated_blocks_are_distinct_and_no_longer_free() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)

    blocks = pool.allocate(3)

    assert len(set(blocks)) == 3
    assert pool.num_free == 1
    pool.check_invariants([blocks])


def test_a_freed_block_is_given_away_again() -> None:
    pool = BlockPool(num_blocks=1, block_size=16)
    (block,) = pool.allocate(1)

    pool.free(block)

    assert pool.allocate(1) == [block]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    (block,) = pool.allocate(1)
    pool.share(block)

    pool.free(block)
    assert pool.num_free == 1
    pool.check_invariants([[block]])

    pool.free(block)
    assert pool.num_free == 2


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)

    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)

    assert pool.num_free == 2


def test_a_free_block_can_be_neither_freed_nor_shared() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)

    with pytest.raises(ValueError, match="is free already"):
        pool.free(0)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_tokens_take_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(num_blocks=2, block_size=16).num_blocks_for(num_tokens) == num_blocks


def test_the_check_finds_a_lost_and_a_wrongly_shared_block() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    blocks = pool.allocate(1)

    with pytest.raises(AssertionError):
        pool.check_invariants([])
    with pytest.raises(AssertionError):
        pool.check_invariants([blocks, blocks])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16 slots"):
        BlockPool(num_blocks=0, block_size=16)
