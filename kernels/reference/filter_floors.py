"""Top-k, top-p and min-p as a single cutoff per row: the lowest logit that may be drawn."""

import numpy as np
import torch
from torch import Tensor

from kernels.shapes import check_shape


def filter_floors(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Return the lowest logit of each row that passes all its filters, [num_rows] float32.

    ``logits`` is [num_rows, vocab_size]; ``temperatures``, ``top_ps`` and ``min_ps`` are [num_rows]
    float32, with positive temperatures; ``top_ks`` is [num_rows] int64, where 0 keeps all tokens.
    Top-k keeps the k highest logits; of these, top-p keeps the most likely tokens until their share
    of the probability, at the row's temperature, reaches p (Holtzman et al., arXiv:1904.09751).
    Min-p keeps tokens at least min_p times as likely as the most likely token (Nguyen et al.,
    arXiv:2407.01082). Tokens as likely as the last kept token are kept too, and the most likely
    token always is. Raises `ValueError` if shapes do not match.
    """
    check_filters(logits, temperatures, top_ks, top_ps, min_ps)
    vocab_size = logits.shape[1]
    descending = _sort_descending(logits.float())
    num_kept = top_ks.where(top_ks > 0, vocab_size).clamp(max=vocab_size).unsqueeze(1)
    is_kept = torch.arange(vocab_size, device=logits.device) < num_kept
    scaled = (descending - descending[:, :1]) / temperatures.unsqueeze(1)
    shares = scaled.masked_fill(~is_kept, -torch.inf).softmax(dim=-1)
    shares_before = shares.cumsum(dim=-1) - shares
    # Rounding may bring the sum to 1 before the end of the row; p = 1 keeps all tokens all the
    # same.
    is_kept &= (shares_before < top_ps.unsqueeze(1)) | (top_ps.unsqueeze(1) >= 1)
    is_kept &= scaled.exp() >= min_ps.unsqueeze(1)
    last = is_kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return descending.gather(1, last).squeeze(1)


def check_filters(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> None:
    """Raise `ValueError` if shapes do not match."""
    num_rows, _ = logits.shape
    check_shape("temperatures", temperatures, (num_rows,))
    check_shape("top_ks", top_ks, (num_rows,))
    check_shape("top_ps", top_ps, (num_rows,))
    check_shape("min_ps", min_ps, (num_rows,))


def _sort_descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # numpy sorts floats with SIMD: 6 ms for 32 rows of 49,152, while torch takes 85 ms.
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(dim=-1, descending=True).values
