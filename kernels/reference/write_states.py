"""The recurrent states of sequences, in blocks of the cache."""

from torch import Tensor

from kernels.reference.read_states import pieces


def write_states(
    states: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    context_lens: Tensor,
    *,
    first: int,
) -> None:
    """Write a layer's states, float32 [num_seqs, size], where `read_states` reads them.

    A sequence without context, which only pads a batch, is not written; no two others have the
    same blocks.
    """
    is_there = context_lens > 0
    states, blocks = states[is_there], blocks[is_there]
    start = 0
    for piece, of_piece in pieces(keys, values, blocks, first, states.shape[1]):
        part = states[:, start : start + piece.shape[1]]
        piece[of_piece, : part.shape[1]] = part
        start += piece.shape[1]
