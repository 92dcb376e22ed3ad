"""The activations of every provider beside the reference in float64."""

import pytest
import torch

from kernels.activation_spec import ActivationSpec
from kernels.providers import Ops
from kernels.reference.activate import activate
from tests.support.models.numerics import assert_close

CONSTANTS = (0.9, 0.7, 0.5, -1e-6)
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@pytest.mark.parametrize("activation", [*PLAIN, "xielu", "clamped_swiglu"])
def test_agrees_with_float64(provided_ops: Ops, activation: str) -> None:
    torch.manual_seed(0)
    constants = CONSTANTS if activation == "xielu" else ()
    hidden = torch.randn(3, 2 * 33) * torch.logspace(-3, 1, 66)
    for is_gated in (False, True):
        if is_gated or activation in PLAIN:
            spec = ActivationSpec(name=activation, is_gated=is_gated, constants=constants)
            found = provided_ops.activate(hidden, spec)
            assert_close(found, activate(hidden.double(), spec), 2e-6)


def test_an_odd_length_has_no_halves(provided_ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 3\], expected \[\*, 2 \* width\]"):
        provided_ops.activate(torch.ones(2, 3), ActivationSpec(name="silu", is_gated=True))
