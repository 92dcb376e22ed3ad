"""A causal convolution of each channel over a few tokens."""

import torch
from torch import Tensor


def short_convolution(
    hidden: Tensor, taps: Tensor, bias: Tensor | None, states: Tensor, query_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve the tokens of several sequences, and return the states after them.

    ``hidden`` is [num_tokens, size], of which sequence s has the tokens ``query_starts[s]`` to
    ``query_starts[s + 1]``, ``query_starts`` [num_seqs + 1] int32. ``taps`` is [num_taps, size]
    float32, the oldest token's factors first, ``bias`` [size] float32. ``states`` has the inputs
    before the first token of each sequence, [num_seqs, num_taps - 1, size] float32, zeros before
    its start. Returns the results, in the type of ``hidden``, and the new states. The products are
    added from the oldest token to the newest.
    """
    num_kept = len(taps) - 1
    lens = query_starts.diff().long()
    starts = query_starts[:-1].long()
    owner = torch.repeat_interleave(lens)
    offsets = torch.arange(len(hidden), device=hidden.device) - starts[owner]
    wide = hidden.float()

    def inputs(owner: Tensor, offsets: Tensor) -> Tensor:
        """The inputs at these places of sequences; before their first token they are negative."""
        tokens = wide[(starts[owner] + offsets).clamp(min=0)]
        kept = states[owner, (num_kept + offsets).clamp(max=num_kept - 1)]
        return torch.where((offsets < 0).unsqueeze(-1), kept, tokens)

    total = torch.zeros_like(wide) if bias is None else bias.expand_as(wide)
    for k, tap in enumerate(taps):
        total = total + tap * inputs(owner, offsets - (num_kept - k))
    rows = torch.arange(len(states), device=hidden.device).repeat_interleave(num_kept)
    last = lens[rows] + torch.arange(-num_kept, 0, device=hidden.device).repeat(len(states))
    return total.to(hidden.dtype), inputs(rows, last).view_as(states)
