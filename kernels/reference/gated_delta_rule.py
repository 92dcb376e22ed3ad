"""The gated delta rule (Yang et al., arXiv:2412.06464): linear attention whose state forgets, and
corrects what it holds of a key."""

import torch
from torch import Tensor

from kernels.reference.sequences import by_token

_EPS = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decays: Tensor,
    strengths: Tensor,
    states: Tensor,
    query_starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mix the tokens of several sequences, and return the states after them.

    ``query`` and ``key`` are [num_tokens, num_key_heads, key_dim], which heads of values share,
    and are normalized here; ``value`` is [num_tokens, num_heads, value_dim]. ``decays``, the
    factors of the states, and ``strengths``, the parts of each correction that are made, are
    [num_tokens, num_heads] float32. A strength between 1 and 2 corrects more than the error.
    ``decays`` may also be [num_tokens, num_heads, key_dim], a factor of each row of the states
    (Kimi Team, arXiv:2510.26692). ``states`` is [num_seqs, num_heads, key_dim, value_dim] float32,
    zeros before the start of a sequence. Sequence s has the tokens ``query_starts[s]`` to
    ``query_starts[s + 1]``, ``query_starts`` [num_seqs + 1] int32. The result is float32
    [num_tokens, num_heads, value_dim]. Tokens are computed one after another, so that results do
    not depend on where a sequence is divided into steps.
    """
    num_shared = value.shape[1] // key.shape[1]
    query = _normalized(query).repeat_interleave(num_shared, dim=1) * key.shape[2] ** -0.5
    key = _normalized(key).repeat_interleave(num_shared, dim=1)
    value, states = value.float(), states.clone()
    decays = decays.reshape(*value.shape[:2], -1, 1)
    results = torch.empty_like(value)
    for sequences, tokens in by_token(query_starts):
        state = states[sequences] * decays[tokens]
        keys = key[tokens].unsqueeze(-1)
        known = (state * keys).sum(dim=-2)
        correction = (value[tokens] - known) * strengths[tokens].unsqueeze(-1)
        state = state + keys * correction.unsqueeze(-2)
        results[tokens] = (state * query[tokens].unsqueeze(-1)).sum(dim=-2)
        states[sequences] = state
    return results, states


def _normalized(heads: Tensor) -> Tensor:
    wide = heads.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + _EPS)
