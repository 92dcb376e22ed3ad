"""The function between the two products of a feed-forward part, in a single pass."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation_spec import ActivationSpec
from kernels.reference.silu_mul import check_gate_up
from kernels.triton.configurations import COMPILED_DTYPES, POINTER_TYPES, Configuration, launch

_BLOCK = 1024
_NUM_CONSTANTS = 4


def activate(hidden: Tensor, spec: ActivationSpec) -> Tensor:
    """See `kernels.reference.activate`; computed in float32 and rounded once."""
    if spec.is_gated:
        check_gate_up(hidden)
    width = hidden.shape[1] // (2 if spec.is_gated else 1)
    rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    product = torch.empty(len(rows), width, dtype=hidden.dtype, device=hidden.device)
    if product.numel():
        grid = (len(rows), triton.cdiv(width, _BLOCK))
        missing = [0.0] * (_NUM_CONSTANTS - len(spec.constants))
        constants = (*map(float, spec.constants), *missing)
        configuration = _configuration(hidden.dtype, spec.name, spec.is_gated)
        launch(configuration, grid, product, rows, width, rows.stride(0), *constants)
    return product


@triton.jit
def activate_kernel(
    product_ptr,
    hidden_ptr,
    width,
    stride,
    first,
    second,
    third,
    fourth,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    places = hidden_ptr + row * stride + columns
    gate = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    other = gate
    if IS_GATED:
        other = tl.load(places + width, mask=is_there, other=0.0).to(tl.float32)
    product = ACTIVATION(gate, other, (first, second, third, fourth), IS_GATED)
    product = product.to(product_ptr.dtype.element_ty)
    tl.store(product_ptr + row * width + columns, product, mask=is_there)


@triton.jit
def _gated(activated, other, IS_GATED: tl.constexpr):
    if IS_GATED:
        activated *= other
    return activated


@triton.jit
def _silu(gate, other, constants, IS_GATED: tl.constexpr):
    return _gated(gate * tl.sigmoid(gate), other, IS_GATED)


@triton.jit
def _gelu(gate, other, constants, IS_GATED: tl.constexpr):
    return _gated(gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)), other, IS_GATED)


@triton.jit
def _gelu_tanh(gate, other, constants, IS_GATED: tl.constexpr):
    # The hyperbolic tangent of x is 2 * sigmoid(2 * x) - 1.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return _gated(gate * tl.sigmoid(inner), other, IS_GATED)


@triton.jit
def _relu(gate, other, constants, IS_GATED: tl.constexpr):
    return _gated(tl.maximum(gate, 0.0), other, IS_GATED)


@triton.jit
def _relu2(gate, other, constants, IS_GATED: tl.constexpr):
    positive = tl.maximum(gate, 0.0)
    return _gated(positive * positive, other, IS_GATED)


@triton.jit
def _xielu(gate, other, constants, IS_GATED: tl.constexpr):
    positive, negative, linear, nearest = constants
    near = tl.minimum(gate, nearest)
    # Close to zero a difference of exponentials would cancel.
    series = 0.16666667 + near * (0.041666668 + near * 0.008333334)
    small = near * (1.0 + near * (0.5 + near * series))
    grown = tl.where(near > -0.1, small, tl.exp(near) - 1.0)
    curved = tl.where(gate > 0.0, positive * gate * gate, negative * (grown - gate))
    return _gated(curved + linear * gate, other, IS_GATED)


@triton.jit
def _clamped_swiglu(gate, other, constants, IS_GATED: tl.constexpr):
    gate = tl.minimum(gate, 7.0)
    other = tl.minimum(tl.maximum(other, -7.0), 7.0)
    return (other + 1.0) * (gate * tl.sigmoid(gate * 1.702))


_ACTIVATIONS: dict[str, Any] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "xielu": _xielu,
    "clamped_swiglu": _clamped_swiglu,
}


@cache
def _configuration(dtype: torch.dtype, activation: str, is_gated: bool) -> Configuration:
    pointers = dict.fromkeys(("product_ptr", "hidden_ptr"), POINTER_TYPES[dtype])
    constants = dict.fromkeys(("first", "second", "third", "fourth"), "fp32")
    return Configuration(
        kernel=activate_kernel,
        signature={**pointers, "width": "i32:16", "stride": "i32:16", **constants},
        constexprs={
            "ACTIVATION": _ACTIVATIONS[activation],
            "IS_GATED": is_gated,
            "BLOCK": _BLOCK,
        },
    )


CONFIGURATIONS = [
    _configuration(torch.bfloat16, activation, activation == "clamped_swiglu")
    for activation in _ACTIVATIONS
] + [_configuration(dtype, "gelu_tanh", is_gated=True) for dtype in COMPILED_DTYPES]
