"""A projection: cuBLAS, a kernel for a single token, or a kernel with fixed tiles if batch
invariance is required.

cuBLAS chooses its tiles, and whether it splits the sum over the inputs, by the number of tokens, so
a token's last bits depend on the size of the batch. The kernel with fixed tiles always uses the
same tile size and order of summation: slower, especially for few tokens.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from kernels.reference import projection as reference
from kernels.shapes import check_shape
from kernels.triton.configurations import COMPILED_DTYPES, POINTER_TYPES, Configuration, launch
from kernels.triton.vector_projection import can_project_vector, project_vector

_BLOCK_TOKENS = 64
_BLOCK_OUTPUTS = 64
_BLOCK_BYTES = 256
"""Bytes of a row of a tile of inputs."""
_GROUP = 8
"""Tiles of tokens that use the same weights in succession, while these are in the cache."""


def projection(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, is_batch_invariant: bool = False
) -> Tensor:
    """See `kernels.reference.projection`.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch;
    tensors must then be contiguous.
    """
    if not is_batch_invariant:
        if can_project_vector(hidden, weight):
            return project_vector(hidden, weight, bias, hidden.dtype)
        return reference.projection(hidden, weight, bias)
    return fixed_tiles(hidden, weight, bias, hidden.dtype)


def fixed_tiles(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``hidden @ weight.T + bias``, summed in float32 and rounded once, to ``dtype``."""
    num_tokens, inputs = hidden.shape
    check_shape("weight", weight, (None, inputs))
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1])
    outputs = weight.shape[0]
    out = torch.empty(num_tokens, outputs, dtype=dtype, device=hidden.device)
    if num_tokens:
        tiles = triton.cdiv(num_tokens, _BLOCK_TOKENS) * triton.cdiv(outputs, _BLOCK_OUTPUTS)
        launch(
            _configuration(weight.dtype, dtype, bias is not None),
            (tiles,),
            out,
            hidden.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias,
            num_tokens,
            outputs,
            inputs,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def projection_kernel(
    out_ptr,
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    num_tokens,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile [BLOCK_M tokens, BLOCK_N outputs] per program."""
    program = tl.program_id(0)
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    first_m = program // (GROUP * num_n) * GROUP
    group = tl.minimum(num_m - first_m, GROUP)
    m = first_m + program % (GROUP * num_n) % group
    n = program % (GROUP * num_n) // group
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows beyond the last row repeat it instead of masking; their results are not stored.
    hidden = hidden_ptr + tl.minimum(rows, num_tokens - 1).to(tl.int64)[:, None] * inputs
    weight = weight_ptr + tl.minimum(columns, outputs - 1).to(tl.int64)[None, :] * inputs
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, inputs, BLOCK_K):
        is_input = k + ks < inputs
        left = tl.load(hidden + (k + ks)[None, :], mask=is_input[None, :], other=0.0)
        right = tl.load(weight + (k + ks)[:, None], mask=is_input[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + tl.minimum(columns, outputs - 1)).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_place = (rows < num_tokens)[:, None] & (columns < outputs)[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_place)


@cache
def _configuration(dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool) -> Configuration:
    return Configuration(
        kernel=projection_kernel,
        signature={
            "out_ptr": POINTER_TYPES[out_dtype],
            **dict.fromkeys(("hidden_ptr", "weight_ptr", "bias_ptr"), POINTER_TYPES[dtype]),
            "num_tokens": "i32",
            "outputs": "i32:16",
            "inputs": "i32:16",
        },
        constexprs={
            "HAS_BIAS": has_bias,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "GROUP": _GROUP,
            "BLOCK_M": _BLOCK_TOKENS,
            "BLOCK_N": _BLOCK_OUTPUTS,
            "BLOCK_K": _BLOCK_BYTES // dtype.itemsize // (2 if dtype == torch.float32 else 1),
        },
        # With float32 output, 4 warps spill on compute capability 10.0.
        num_warps=4 if dtype == out_dtype else 8,
        num_stages=2 if dtype == torch.float32 else 3,
    )


def _configurations() -> Iterator[Configuration]:
    for dtype in COMPILED_DTYPES:
        yield _configuration(dtype, dtype, has_bias=True)
    yield _configuration(torch.bfloat16, torch.float32, has_bias=False)


CONFIGURATIONS = tuple(_configurations())
