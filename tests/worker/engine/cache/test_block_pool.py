import random

import pytest

from worker.engine.cache.block_pool import BlockPool


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

    with pytest.raises(ValueError, match="3 blocks requested, 2 free"):
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


def named_pool(names: bytes, num_blocks: int) -> tuple[BlockPool, list[int]]:
    """A pool and blocks that are in use, each named by a byte of ``names``."""
    pool = BlockPool(num_blocks, block_size=16)
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, bytes([name]))
    return pool, blocks


def test_a_named_block_is_found_and_shared_after_it_was_freed() -> None:
    pool, (block,) = named_pool(b"a", num_blocks=2)
    pool.free(block)
    assert (pool.num_free, pool.find(b"a")) == (2, block)

    pool.share(block)

    assert pool.num_free == 1
    pool.check_invariants([[block]])


def test_a_block_is_forgotten_when_its_memory_is_given_away() -> None:
    pool, (block,) = named_pool(b"a", num_blocks=1)
    pool.free(block)

    assert pool.allocate(1) == [block]

    assert pool.find(b"a") is None
    pool.check_invariants([[block]])


def test_named_blocks_are_given_away_last_and_in_the_order_in_which_they_were_freed() -> None:
    pool, blocks = named_pool(b"abc", num_blocks=5)
    for k in (1, 2, 0):
        pool.free(blocks[k])

    unnamed = pool.allocate(2)

    assert not set(unnamed) & set(blocks)
    assert [pool.allocate(1) for _ in blocks] == [[blocks[1]], [blocks[2]], [blocks[0]]]


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool, (first, second) = named_pool(b"aa", num_blocks=2)

    pool.free(second)

    assert pool.find(b"a") == first
    pool.check_invariants([[first]])


def test_the_check_finds_a_name_that_was_lost() -> None:
    pool, (block,) = named_pool(b"a", num_blocks=1)

    del pool._by_name[b"a"]

    with pytest.raises(AssertionError):
        pool.check_invariants([[block]])


class PlainPool:
    """The specification of a pool in its simplest form: names by block, and free blocks in
    order."""

    def __init__(self, num_blocks: int) -> None:
        self.names: dict[int, bytes] = {}
        self.freed: list[int] = []
        self.num_unnamed = num_blocks

    def find(self, name: bytes) -> int | None:
        return next((block for block, other in self.names.items() if other == name), None)

    def allocate(self, block: int) -> None:
        if self.num_unnamed:
            self.num_unnamed -= 1
            assert block not in self.names
        else:
            assert block == self.freed.pop(0)
            del self.names[block]

    def free(self, block: int) -> None:
        if block in self.names:
            self.freed.append(block)
        else:
            self.num_unnamed += 1


@pytest.mark.parametrize("seed", range(8))
def test_it_does_what_a_plain_model_does(seed: int) -> None:
    rng = random.Random(seed)
    pool, plain = BlockPool(num_blocks=12, block_size=16), PlainPool(num_blocks=12)
    held: list[int] = []
    for _ in range(1000):
        name = bytes([rng.randrange(16)])
        found = pool.find(name)
        assert found == plain.find(name)
        match rng.choice(["allocate", "name", "share", "free"]):
            case "allocate" if pool.num_free:
                (block,) = pool.allocate(1, for_states=rng.random() < 0.5)
                plain.allocate(block)
                held.append(block)
            case "name" if held and plain.names.get(block := rng.choice(held)) is None:
                pool.name(block, name)
                if found is None:
                    plain.names[block] = name
            case "share" if found is not None:
                pool.share(found)
                if found not in held:
                    plain.freed.remove(found)
                held.append(found)
            case "free" if held:
                pool.free(block := held.pop(rng.randrange(len(held))))
                if block not in held:
                    plain.free(block)
        pool.check_invariants([held])
        assert pool.num_free == plain.num_unnamed + len(plain.freed)
        assert sum(pool.counts) == pool.num_blocks


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16 slots"):
        BlockPool(num_blocks=0, block_size=16)
