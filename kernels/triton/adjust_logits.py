"""Penalties, biases and bans of individual tokens, in place."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.adjust_logits import check_entries
from kernels.triton.configurations import Configuration, launch

_BLOCK = 128


def adjust_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, repetitions: Tensor, biases: Tensor
) -> Tensor:
    """See `kernels.reference.adjust_logits`. Reads and writes a logit for each entry."""
    check_entries(rows, token_ids, repetitions, biases)
    logits = logits.contiguous()
    num_entries = len(rows)
    if num_entries:
        grid = (triton.cdiv(num_entries, _BLOCK),)
        entries = [t.contiguous() for t in (rows, token_ids, repetitions, biases)]
        launch(_CONFIGURATION, grid, logits, *entries, num_entries, logits.shape[1])
    return logits


@triton.jit(do_not_specialize=["num_entries"])
def adjust_logits_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    repetitions_ptr,
    biases_ptr,
    num_entries,
    vocab_size,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entries < num_entries
    rows = tl.load(rows_ptr + entries, mask=is_entry, other=0)
    token_ids = tl.load(token_ids_ptr + entries, mask=is_entry, other=0)
    places = logits_ptr + rows * vocab_size + token_ids
    repetitions = tl.load(repetitions_ptr + entries, mask=is_entry, other=1.0)
    biases = tl.load(biases_ptr + entries, mask=is_entry, other=0.0)
    logits = tl.load(places, mask=is_entry, other=0.0)
    penalized = tl.where(logits > 0, logits / repetitions, logits * repetitions)
    tl.store(places, penalized + biases, mask=is_entry)


_CONFIGURATION = Configuration(
    kernel=adjust_logits_kernel,
    signature={
        "logits_ptr": "*fp32:16",
        "rows_ptr": "*i64:16",
        "token_ids_ptr": "*i64:16",
        "repetitions_ptr": "*fp32:16",
        "biases_ptr": "*fp32:16",
        "num_entries": "i32",
        "vocab_size": "i32:16",
    },
    constexprs={"BLOCK": _BLOCK},
)
CONFIGURATIONS = [_CONFIGURATION]
