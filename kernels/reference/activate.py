"""The function between the two products of a feed-forward part."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.reference.silu_mul import check_gate_up

_LIMIT = 7.0
_STEEPNESS = 1.702


def activate(hidden: Tensor, activation: str, *, is_gated: bool) -> Tensor:
    """Return ``activation(hidden)``, or ``activation(gate) * up`` for the halves of ``hidden``.

    ``hidden`` is [num_tokens, width] or [num_tokens, 2 * width], gate first; the result is
    [num_tokens, width]. ``activation`` is silu, gelu, gelu_tanh, relu, relu2, or clamped_swiglu,
    which is gated and adds one to the other half. Raises `ValueError` if a gated length is odd.
    """
    if not is_gated:
        return _ACTIVATIONS[activation](hidden)
    check_gate_up(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))
    return _ACTIVATIONS[activation](gate) * up


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden, approximate="tanh")


def _relu2(hidden: Tensor) -> Tensor:
    return functional.relu(hidden).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
}
