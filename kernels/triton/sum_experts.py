"""The sum of the experts of each token, in a single pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shapes import check_shape
from kernels.triton.configurations import COMPILED_DTYPES, POINTER_TYPES, Configuration, launch

_BLOCK = 1024


def sum_experts(outputs: Tensor, shares: Tensor) -> Tensor:
    """See `kernels.reference.sum_experts`."""
    check_shape("outputs", outputs, (shares.numel(), None))
    (num_tokens, top_k), size = shares.shape, outputs.shape[1]
    total = torch.empty(num_tokens, size, dtype=outputs.dtype, device=outputs.device)
    if num_tokens:
        launch(
            _configuration(outputs.dtype),
            (num_tokens, triton.cdiv(size, _BLOCK)),
            total,
            outputs.contiguous(),
            shares.contiguous(),
            size,
            top_k,
        )
    return total


@triton.jit(do_not_specialize=["top_k"])
def sum_experts_kernel(total_ptr, outputs_ptr, shares_ptr, size, top_k, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.range(0, top_k):
        row = token * top_k + k
        output = tl.load(outputs_ptr + row * size + columns, mask=is_there, other=0.0)
        weighed = output.to(tl.float32) * tl.load(shares_ptr + row)
        total += weighed.to(outputs_ptr.dtype.element_ty).to(tl.float32)
    total = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * size + columns, total, mask=is_there)


@cache
def _configuration(dtype: torch.dtype) -> Configuration:
    return Configuration(
        kernel=sum_experts_kernel,
        signature={
            **dict.fromkeys(("total_ptr", "outputs_ptr"), POINTER_TYPES[dtype]),
            "shares_ptr": "*fp32:16",
            "size": "i32:16",
            "top_k": "i32",
        },
        constexprs={"BLOCK": _BLOCK},
    )


CONFIGURATIONS = [_configuration(dtype) for dtype in COMPILED_DTYPES]
