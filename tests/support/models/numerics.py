"""Comparison of tensors."""

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The maximum difference relative to the maximum value; infinite if shapes or NaN differ."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_close(actual: Tensor, expected: Tensor, max_relative_error: float) -> None:
    error = relative_error(actual, expected)
    assert error <= max_relative_error, f"relative error {error:.2e} over {max_relative_error:.0e}"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN, so that a read of memory that was never written shows in the result."""
    return torch.full(shape, torch.nan, dtype=dtype)
