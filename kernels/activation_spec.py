"""What is computed between the two products of a feed-forward part, for the kernels of all
providers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """An activation of all inputs, or of their first half, by which the second half is multiplied.

    ``name`` is silu, gelu, gelu_tanh, relu, relu2, xielu, or clamped_swiglu, which is gated and
    adds 1 to the second half.
    """

    name: str
    is_gated: bool
    constants: tuple[float, ...] = ()
    """The four constants of xielu, which layers have learned."""
