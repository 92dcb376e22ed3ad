"""States in blocks of the cache, of every provider. Here a block of two places has four pieces of
192 floats."""

import torch
from torch import Tensor

from kernels.providers import Ops


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def cache() -> Tensor:
    return torch.full((2, 6, 16, 3, 8), torch.nan, dtype=torch.bfloat16)


def test_a_state_is_divided_among_the_places_of_its_blocks(provided_ops: Ops) -> None:
    keys, values = cache(), cache()
    blocks = torch.tensor([[5, 0], [2, 4]], dtype=torch.int32)
    starts, lens = ints(0, 1, 2), ints(5, 9)
    states = {(0, 450): torch.rand(2, 450), (3, 700): torch.rand(2, 700)}

    for (first, _), written in states.items():
        provided_ops.write_states(written, keys, values, blocks, lens, first=first)

    for (first, size), written in states.items():
        for order in ([0, 1], [1, 0]):
            found = provided_ops.read_states(
                keys, values, blocks[order], starts, lens, first=first, size=size
            )
            assert torch.equal(found, written[order])
    for unused in (1, 3):
        assert keys[:, unused].isnan().all()
        assert values[:, unused].isnan().all()


def test_a_sequence_begins_with_zeros_and_padding_writes_nothing(provided_ops: Ops) -> None:
    keys, values = cache(), cache()
    blocks = torch.tensor([[1], [0]], dtype=torch.int32)
    starts, lens = ints(0, 1, 2), ints(1, 0)

    provided_ops.write_states(torch.ones(2, 300), keys, values, blocks, lens, first=1)

    assert keys[:, 0].isnan().all()
    assert values[:, 0].isnan().all()
    found = provided_ops.read_states(keys, values, blocks, starts, lens, first=0, size=9)
    assert not found[0].any()
