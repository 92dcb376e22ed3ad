"""The gate of a gated linear unit (Shazeer, arXiv:2002.05202) with SiLU activation."""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for ``gate_up`` [num_tokens, 2 * width], gate first.

    The result is [num_tokens, width]. Raises `ValueError` if the last length is odd.
    """
    check_gate_up(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def check_gate_up(gate_up: Tensor) -> None:
    """Raise `ValueError` if the last length is odd."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}, expected [*, 2 * width]")
