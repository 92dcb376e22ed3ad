"""The recurrence of selective state spaces of single channels (Gu and Dao, arXiv:2312.00752), token
by token."""

import torch
from torch import Tensor

from kernels.reference.sequences import by_token


def selective_scan(
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

    ``hidden`` and ``steps`` are [num_tokens, size], ``rates`` is [size, state_dim], ``writes`` and
    ``reads`` are [num_tokens, state_dim]. ``states`` is [num_seqs, size, state_dim], zeros before
    the start of a sequence. All are float32. Sequence s has the tokens ``query_starts[s]`` to
    ``query_starts[s + 1]``, ``query_starts`` [num_seqs + 1] int32.

    With a token, a channel's state becomes exp(step * rates) * state + step * hidden * write, and
    the result is the product of the state with the token's read. Returns the results, of the shape
    of ``hidden``, and the new states. No token depends on how its sequence is cut into steps.
    """
    scaled = (hidden * steps).unsqueeze(2)
    states, results = states.clone(), torch.empty_like(hidden)
    for sequences, tokens in by_token(query_starts):
        decays = torch.exp(steps[tokens].unsqueeze(2) * rates)
        state = decays * states[sequences] + scaled[tokens] * writes[tokens].unsqueeze(1)
        states[sequences] = state
        results[tokens] = (state * reads[tokens].unsqueeze(1)).sum(dim=2)
    return results, states
