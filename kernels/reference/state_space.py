"""The recurrence of a selective state space (Dao and Gu, arXiv:2405.21060), token by token."""

import torch
from torch import Tensor

from kernels.reference.sequences import by_token


def state_space(
    hidden: Tensor,
    steps: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    states: Tensor,
    query_starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Read what the states of several sequences have kept after each token, and return the states
    after the last token of each.

    ``hidden`` is [num_tokens, num_heads, head_dim], ``steps`` [num_tokens, num_heads], ``rates``
    [num_heads], ``writes`` and ``reads`` [num_tokens, num_groups, state_dim], where a group has
    adjacent heads. ``states`` is [num_seqs, num_heads, head_dim, state_dim], zeros before the start
    of a sequence. All are float32. Sequence s has the tokens ``query_starts[s]`` to
    ``query_starts[s + 1]``, ``query_starts`` [num_seqs + 1] int32.

    With a token, a head's state becomes exp(step * rate) * state + step * hidden * write, and the
    result is the product of the state with the token's read. Returns the results, of the shape of
    ``hidden``, and the new states. No token depends on how its sequence is cut into steps.
    """
    num_heads, num_groups = hidden.shape[1], writes.shape[1]
    decays = torch.exp(steps * rates)[:, :, None, None]
    scaled = (hidden * steps.unsqueeze(2)).unsqueeze(3)
    writes, reads = (
        vectors.repeat_interleave(num_heads // num_groups, dim=1).unsqueeze(2)
        for vectors in (writes, reads)
    )
    states, results = states.clone(), torch.empty_like(hidden)
    for sequences, tokens in by_token(query_starts):
        state = decays[tokens] * states[sequences] + scaled[tokens] * writes[tokens]
        states[sequences] = state
        results[tokens] = (state * reads[tokens]).sum(dim=3)
    return results, states
