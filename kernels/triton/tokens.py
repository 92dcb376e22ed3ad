"""Checks of the memory layout and types of tensors."""

from torch import Tensor


def check_tokens(**tensors: Tensor) -> None:
    """Raise `ValueError` unless the heads of each token are adjacent: [num_tokens, heads, dim].

    The tokens may be strided, as in a slice of a fused projection.
    """
    for name, tensor in tensors.items():
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}, expected (*, {tensor.shape[2]}, 1)"
            )


def with_adjacent_heads(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, in which everything of a token or sequence, the first dimension, is
    adjacent. Slices of a fused projection stay as they are."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()


def check_contiguous(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all tensors are contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous elements")


def check_dtypes(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all tensors have the same dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{listed}, expected one dtype")


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """The number of query heads per key head. Raises `ValueError` if it is not an integer."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key heads")
    return num_heads // num_kv_heads
