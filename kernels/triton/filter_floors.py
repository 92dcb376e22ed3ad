"""Top-k, top-p and min-p without sorting: a search for the lowest logit that passes.

Whether a filter keeps a logit depends on the number of higher logits and on their total weight.
Both are sums over the row, which are much cheaper than sorting it (as in FlashInfer's sampling
kernels, arXiv:2501.01005). A program searches a row by bisection. It narrows the interval to
existing logits, so that it ends exactly at such a logit. Each pass reads the row once, from the
cache if it fits; between 10 and 20 passes are needed to separate adjacent values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.filter_floors import check_filters
from kernels.triton.configurations import Configuration, launch

_BLOCK = 8192
_MAX_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
_LOG2_E = tl.constexpr(1.4426950408889634)


def filter_floors(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """See `kernels.reference.filter_floors`; a floor of -inf is returned as the lowest finite
    float."""
    check_filters(logits, temperatures, top_ks, top_ps, min_ps)
    logits = logits.float().contiguous()
    num_rows, vocab_size = logits.shape
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        params = [t.contiguous() for t in (temperatures, top_ks, top_ps, min_ps)]
        launch(_CONFIGURATION, (num_rows,), floors, logits, *params, vocab_size)
    return floors


@triton.jit
def filter_floors_kernel(
    floors_ptr,
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    scale = logit_scale(tl.load(temperatures_ptr + row))
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    least, most, mass = _survey(row_ptr, vocab_size, scale, BLOCK)
    floor = least
    if (top_k > 0) & (top_k < vocab_size):
        floor, num_above, mass_above = _search(
            row_ptr, vocab_size, scale, least, most, top_k, _MAX_FLOAT, 0.0, BLOCK
        )
        # Of tokens as likely as the k-th, only the tokens within k count.
        mass = mass_above + (top_k - num_above) * tl.exp2((floor - most) * scale)
    if (top_p < 1) | (min_p > 0):
        max_mass = tl.where(top_p < 1, top_p * mass, _MAX_FLOAT)
        floor, _, _ = _search(
            row_ptr, vocab_size, scale, floor, most, vocab_size.to(tl.int64), max_mass, min_p, BLOCK
        )
    tl.store(floors_ptr + row, floor)


@triton.jit
def logit_scale(temperature):
    """The factor that converts a difference of logits to the base-2 logarithm of their ratio;
    finite."""
    return tl.minimum(1.0 / temperature * _LOG2_E, _MAX_FLOAT)


@triton.jit
def _load(row_ptr, columns, vocab_size, other):
    """Logits as finite float32, so that differences are never NaN and bisection terminates."""
    logits = tl.load(row_ptr + columns, mask=columns < vocab_size, other=other)
    return tl.minimum(tl.maximum(logits, -_MAX_FLOAT), _MAX_FLOAT)


@triton.jit
def _survey(row_ptr, vocab_size, scale, BLOCK: tl.constexpr):
    """The minimum and maximum logit, and the sum of all weights."""
    columns = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _load(row_ptr, start + columns, vocab_size, 0.0)
        is_there = start + columns < vocab_size
        lowest = tl.minimum(lowest, tl.where(is_there, logits, float("inf")))
        highest = tl.maximum(highest, tl.where(is_there, logits, float("-inf")))
    most = tl.max(highest)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _load(row_ptr, start + columns, vocab_size, float("-inf"))
        masses += tl.exp2((logits - most) * scale)
    return tl.min(lowest), most, tl.sum(masses)


@triton.jit
def _search(
    row_ptr, vocab_size, scale, low, most, max_count, max_mass, min_weight, BLOCK: tl.constexpr
):
    """The lowest kept logit v of the row, from ``low`` to ``most``: fewer than ``max_count`` logits
    are higher, their weight is less than ``max_mass``, and v is at least ``min_weight``.

    ``most`` is always kept. Returns v, and the number and weight of the higher logits.
    """
    columns = tl.arange(0, BLOCK)
    kept = most
    num_above = tl.zeros([], tl.int64)
    mass_above = tl.zeros([], tl.float32)
    while low < kept:
        middle = low * 0.5 + kept * 0.5
        middle = tl.where((middle >= low) & (middle < kept), middle, low)
        counts = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.float32)
        belows = tl.full([BLOCK], float("-inf"), tl.float32)
        aboves = tl.full([BLOCK], float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = _load(row_ptr, start + columns, vocab_size, float("-inf"))
            is_above = logits > middle
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp2((logits - most) * scale), 0.0)
            belows = tl.maximum(belows, tl.where(is_above, float("-inf"), logits))
            aboves = tl.minimum(aboves, tl.where(is_above, logits, float("inf")))
        # No logit is between `below` and `middle`: the same logits are above both.
        below = tl.max(belows)
        count = tl.sum(counts).to(tl.int64)
        mass = tl.sum(masses)
        is_kept = (count < max_count) & (mass < max_mass)
        is_kept &= tl.exp2((below - most) * scale) >= min_weight
        low = tl.where(is_kept, low, tl.min(aboves))
        kept = tl.where(is_kept, below, kept)
        num_above = tl.where(is_kept, count, num_above)
        mass_above = tl.where(is_kept, mass, mass_above)
    return kept, num_above, mass_above


_CONFIGURATION = Configuration(
    kernel=filter_floors_kernel,
    signature={
        "floors_ptr": "*fp32:16",
        "logits_ptr": "*fp32:16",
        "temperatures_ptr": "*fp32:16",
        "top_ks_ptr": "*i64:16",
        "top_ps_ptr": "*fp32:16",
        "min_ps_ptr": "*fp32:16",
        "vocab_size": "i32:16",
    },
    constexprs={"BLOCK": _BLOCK},
    num_warps=16,
)
CONFIGURATIONS = [_CONFIGURATION]
