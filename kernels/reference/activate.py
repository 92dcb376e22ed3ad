"""The function between the two products of a feed-forward part."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation_spec import ActivationSpec
from kernels.reference.silu_mul import check_gate_up

_LIMIT = 7.0
_STEEPNESS = 1.702


def activate(hidden: Tensor, spec: ActivationSpec) -> Tensor:
    """Return ``activation(hidden)``, or ``activation(gate) * up`` for the halves of ``hidden``.

    ``hidden`` is [num_tokens, width] or [num_tokens, 2 * width], gate first; the result is
    [num_tokens, width]. Raises `ValueError` if a gated length is odd.
    """
    if not spec.is_gated:
        return _ACTIVATIONS[spec.name](hidden, *spec.constants)
    check_gate_up(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    if spec.name == "clamped_swiglu":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))
    return _ACTIVATIONS[spec.name](gate, *spec.constants) * up


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden, approximate="tanh")


def _relu2(hidden: Tensor) -> Tensor:
    return functional.relu(hidden).square()


def _xielu(
    hidden: Tensor, positive: float, negative: float, linear: float, nearest: float
) -> Tensor:
    """xIELU (Huang and Schlag, arXiv:2411.13010): squares above zero, exponentials below."""
    below = torch.expm1(hidden.clamp(max=nearest)) - hidden
    curved = torch.where(hidden > 0, positive * hidden * hidden, negative * below)
    return curved + linear * hidden


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
    "xielu": _xielu,
}
