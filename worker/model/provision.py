"""Chooses the kernel provider for a model."""

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from kernels.native.build import LibraryUnavailable
from kernels.native.library import library
from kernels.native.packed import CodeBits
from kernels.native.paged_attention import CACHE_TYPES, HEAD_STEP, MAX_HEAD_DIM, SPAN
from kernels.providers import Ops, Provider, load_ops
from shared.errors import StartupError

logger = logging.getLogger(__name__)

_CODE_BITS: Mapping[str, CodeBits] = {"auto": 8, "native": 8, "native-int16": 16}
"""The values of the ``kernels`` setting with which models run on the native kernels, and the bits
of activations there, where weights are quantized."""


def code_bits_of(kernels: str) -> CodeBits | None:
    """The bits of activations on the native kernels; None if these may not be used."""
    return _CODE_BITS.get(kernels)


def provider_on(device: torch.device, kernels: str) -> Provider:
    """The provider of all operations outside the native kernels, for the ``kernels`` setting.

    Raises `StartupError` if the requested kernels do not run on ``device``.
    """
    if kernels == "triton" and device.type == "cpu":
        raise StartupError("the Triton kernels run on a GPU, not on the CPU")
    return "triton" if device.type == "cuda" and kernels in ("auto", "triton") else "reference"


def can_be_native(kernels: str, why_not: Callable[[], str | None]) -> bool:
    """Whether the native kernels are used: they are requested and nothing prevents it.

    Raises `StartupError` if they are requested explicitly but not possible.
    """
    if code_bits_of(kernels) is None:
        return False
    obstacle = why_not()
    if kernels != "auto" and obstacle is not None:
        raise StartupError(obstacle)
    if obstacle is not None:
        logger.warning("falling back to reference kernels", extra={"reason": obstacle})
    return obstacle is None


def native_obstacle(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why the native kernels cannot run a model with such heads; None if they can."""
    if device.type != "cpu":
        return f"the native kernels run on the CPU, not on {device.type}"
    if dtype not in CACHE_TYPES:
        return f"the native kernels know float32 and bfloat16, not {str(dtype)[6:]}"
    if head_dim % HEAD_STEP or head_dim > MAX_HEAD_DIM:
        return f"the native kernels have no head_dim of {head_dim}"
    try:
        library()
    except LibraryUnavailable as error:
        return f"the native kernels are not available: {error}"
    return None


def foreign_ops(
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dims: Iterable[int],
    block_size: int,
    is_batch_invariant: bool = False,
) -> Ops:
    """The operations for a transformers model, which uses only attention, with heads of these
    sizes.

    Raises `StartupError` like `provider_on` and `can_be_native`.
    """
    provider = provider_on(device, kernels)
    if provider == "triton":
        return load_ops(provider, is_batch_invariant=is_batch_invariant)

    def why_not() -> str | None:
        if SPAN % block_size:
            return f"the native kernels have no blocks of {block_size} tokens"
        obstacles = (native_obstacle(head_dim, dtype, device) for head_dim in head_dims)
        return next(filter(None, obstacles), None)

    return load_ops("native" if can_be_native(kernels, why_not) else provider)
