"""Masks logits with the tokens that a grammar allows, in place."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.mask_logits import WORD_BITS, check_masks
from kernels.triton.configurations import Configuration, launch

_BLOCK_WORDS = 64


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """See `kernels.reference.mask_logits`. Reads the masks, and writes only banned logits."""
    check_masks(logits, rows, masks)
    logits, rows, masks = logits.contiguous(), rows.contiguous(), masks.contiguous()
    num_masked, num_words = masks.shape
    if num_masked:
        grid = (num_masked, triton.cdiv(num_words, _BLOCK_WORDS))
        launch(_CONFIGURATION, grid, logits, rows, masks, num_words, logits.shape[1])
    return logits


@triton.jit(do_not_specialize=["num_words"])
def mask_logits_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    num_words,
    vocab_size,
    BLOCK_WORDS: tl.constexpr,
    WORD_BITS: tl.constexpr,
):
    mask_row = tl.program_id(0).to(tl.int64)
    logits_row = tl.load(rows_ptr + mask_row) * vocab_size
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    bits = tl.arange(0, WORD_BITS)[None, :]
    mask = tl.load(masks_ptr + mask_row * num_words + words, mask=words < num_words, other=0)
    is_banned = (mask[:, None] >> bits & 1) == 0
    tokens = words[:, None] * WORD_BITS + bits
    places = logits_ptr + logits_row + tokens
    banned = tl.full([BLOCK_WORDS, WORD_BITS], float("-inf"), tl.float32)
    tl.store(places, banned, mask=is_banned & (tokens < vocab_size))


_CONFIGURATION = Configuration(
    kernel=mask_logits_kernel,
    signature={
        "logits_ptr": "*fp32:16",
        "rows_ptr": "*i64:16",
        "masks_ptr": "*i32:16",
        "num_words": "i32",
        "vocab_size": "i32:16",
    },
    constexprs={"BLOCK_WORDS": _BLOCK_WORDS, "WORD_BITS": WORD_BITS},
)
CONFIGURATIONS = [_CONFIGURATION]
