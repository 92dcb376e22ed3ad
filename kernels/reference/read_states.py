"""The recurrent states of sequences, in blocks of the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor


def read_states(
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    first: int,
    size: int,
) -> Tensor:
    """Return a layer's states before a step: float32 [num_seqs, size], zeros for sequences that
    begin with this step.

    ``keys`` and ``values`` are the whole cache, contiguous [num_places, num_blocks, ...]. A block
    has 2 * num_places pieces, alternately of keys and of values. A state is in ``blocks``, int32
    [num_seqs, any], from piece ``first`` on, counted over the blocks of a sequence, and each layer
    begins with a piece of its own. ``query_starts`` is [num_seqs + 1] int32, ``context_lens``
    [num_seqs] int32.
    """
    found = [piece[of_piece] for piece, of_piece in pieces(keys, values, blocks, first, size)]
    begins = context_lens == query_starts.diff()
    return torch.cat(found, dim=1)[:, :size].masked_fill(begins.unsqueeze(1), 0.0)


def pieces(
    keys: Tensor, values: Tensor, blocks: Tensor, first: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of a layer's state in all blocks of the cache, float32 [num_blocks, floats], and
    the blocks of the sequences that have it, [num_seqs]."""
    caches = [floats_of(cache) for cache in (keys, values)]
    num_places, _, num_floats = caches[0].shape
    for at in range(first, first - (-size // num_floats)):
        block, piece = divmod(at, 2 * num_places)
        yield caches[piece % 2][piece // 2], blocks[:, block]


def floats_of(cache: Tensor) -> Tensor:
    """Keys or values as floats of a state: float32 [num_places, num_blocks, floats]."""
    return cache.view(*cache.shape[:2], -1).view(torch.float32)
