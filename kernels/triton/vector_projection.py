"""A projection of a single token, as fast as the weight can be read.

Each program reads a few rows of the weight, up to 4096 inputs at a time: the first inputs before it
waits for the kernel that computes the token, so that memory is busy between the kernels too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shapes import check_shape
from kernels.triton.configurations import (
    COMPILED_DTYPES,
    POINTER_TYPES,
    Configuration,
    has_pdl,
    launch,
    pdl_targets,
)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a program reads at a time."""

    outputs: int
    inputs: int
    is_whole: bool
    """Whether these are all inputs."""


_MAX_WHOLE = 4096
_LOOPED = _Block(8, 2048, is_whole=False)
"""If there are more inputs. Of the variants tried, this and four rows at once were the fastest on
an H100."""


def can_project_vector(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `project_vector` is faster than cuBLAS: for a single token, if all loads are
    aligned."""
    is_aligned = weight.is_contiguous() and weight.shape[-1] % 16 == 0
    return hidden.device.type == "cuda" and hidden.shape[0] == 1 and is_aligned


def project_vector(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``hidden @ weight.T + bias`` for ``hidden`` [1, inputs]: [1, outputs], summed in float32 and
    rounded once, to ``dtype``.

    ``weight`` must be contiguous, and not be written by any kernel that may still run, because it
    is read before those kernels end; see `kernels.triton.configurations.has_pdl`.
    """
    check_shape("hidden", hidden, (1, None))
    check_shape("weight", weight, (None, hidden.shape[1]))
    outputs, inputs = weight.shape
    if bias is not None:
        check_shape("bias", bias, (outputs,))
    out = torch.empty(1, outputs, dtype=dtype, device=hidden.device)
    block, uses_pdl = _block(inputs), has_pdl(hidden.device)
    launch(
        _configuration(weight.dtype, dtype, block, bias is not None, uses_pdl),
        (triton.cdiv(outputs, block.outputs),),
        out,
        hidden.contiguous(),
        weight,
        weight if bias is None else bias.contiguous(),
        outputs,
        inputs,
    )
    return out


def _block(inputs: int) -> _Block:
    if inputs > _MAX_WHOLE:
        return _LOOPED
    return _Block(4, triton.next_power_of_2(inputs), is_whole=True)


@triton.jit
def _sums(weights, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Products [ROWS, BLOCK] summed over the VECTOR neighbours that a thread has loaded."""
    products = weights.to(tl.float32) * hidden.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, (ROWS, BLOCK // VECTOR, VECTOR)), axis=2)


@triton.jit
def vector_projection_kernel(
    out_ptr,
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    HAS_PDL: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """BLOCK_OUTPUTS outputs per program."""
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows beyond the last row repeat it instead of masking; their results are not stored.
    rows = tl.minimum(outs, outputs - 1)
    ks = tl.arange(0, BLOCK_INPUTS)
    is_input = ks < inputs
    weight_ptr += rows.to(tl.int64)[:, None] * inputs + ks[None, :]
    # Each weight is read once: it is not to displace the token from the cache.
    weights = tl.load(weight_ptr, mask=is_input[None, :], other=0.0, eviction_policy="evict_first")
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    hidden = tl.load(hidden_ptr + ks, mask=is_input, other=0.0)
    sums = _sums(weights, hidden, BLOCK_OUTPUTS, BLOCK_INPUTS, VECTOR)
    if not IS_WHOLE:
        for k in tl.range(BLOCK_INPUTS, inputs, BLOCK_INPUTS):
            is_input = k + ks < inputs
            weights = tl.load(
                weight_ptr + k, mask=is_input[None, :], other=0.0, eviction_policy="evict_first"
            )
            hidden = tl.load(hidden_ptr + k + ks, mask=is_input, other=0.0)
            sums += _sums(weights, hidden, BLOCK_OUTPUTS, BLOCK_INPUTS, VECTOR)
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += bias
    tl.store(out_ptr + outs, total.to(out_ptr.dtype.element_ty), mask=outs < outputs)


@cache
def _configuration(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    block: _Block,
    has_bias: bool,
    uses_pdl: bool,
) -> Configuration:
    vector = 16 // dtype.itemsize
    return Configuration(
        kernel=vector_projection_kernel,
        signature={
            "out_ptr": POINTER_TYPES[out_dtype],
            **dict.fromkeys(("hidden_ptr", "weight_ptr", "bias_ptr"), POINTER_TYPES[dtype]),
            "outputs": "i32:16",
            "inputs": "i32:16",
        },
        constexprs={
            "HAS_BIAS": has_bias,
            "HAS_PDL": uses_pdl,
            "IS_WHOLE": block.is_whole,
            "VECTOR": min(vector, block.inputs),
            "BLOCK_OUTPUTS": block.outputs,
            "BLOCK_INPUTS": block.inputs,
        },
        # More stages would copy weights to shared memory, which is smaller than the registers.
        num_stages=1,
        targets=pdl_targets(uses_pdl),
    )


def _configurations() -> Iterator[Configuration]:
    for uses_pdl in (False, True):
        for inputs in (_MAX_WHOLE, _MAX_WHOLE + 1):
            block = _block(inputs)
            for dtype in COMPILED_DTYPES:
                yield _configuration(dtype, dtype, block, has_bias=True, uses_pdl=uses_pdl)
            yield _configuration(torch.bfloat16, torch.float32, block, False, uses_pdl)


CONFIGURATIONS = tuple(_configurations())
