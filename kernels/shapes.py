"""Shape checks for tensor arguments."""

from collections.abc import Sequence

from torch import Tensor


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """Raise `ValueError` naming both shapes unless they match; None matches any length."""
    if len(tensor.shape) != len(expected) or any(
        want is not None and have != want for have, want in zip(tensor.shape, expected, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in expected)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
