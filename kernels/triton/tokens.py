"""How the heads of tokens must lie for a kernel to find them."""

from torch import Tensor


def check_tokens(**tensors: Tensor) -> None:
    """Raise `ValueError` unless the heads of each token are adjacent: [num_tokens, heads, dim].

    The tokens may lie apart, as those of a part of a fused projection do.
    """
    for name, tensor in tensors.items():
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}, expected (*, {tensor.shape[2]}, 1)"
            )


def check_contiguous(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all elements lie in their order."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous elements")


def check_dtypes(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all have one dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{listed}, expected one dtype")


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that share a key head. Raises `ValueError` if that is no whole number."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
    return num_heads // num_kv_heads
