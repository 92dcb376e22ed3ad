"""The ways in which kernels are launched, so that each can be compiled where no GPU is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Constexpr: TypeAlias = int | float | bool | str | None

TARGETS = (80, 90, 100)
POINTER_TYPES = {
    torch.bfloat16: "*bf16:16",
    torch.float16: "*fp16:16",
    torch.float32: "*fp32:16",
}
COMPILED_DTYPES = (torch.bfloat16, torch.float32)
"""In advance: float16 takes the registers and the memory of bfloat16."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One specialisation of a kernel; its module lists all that it launches as CONFIGURATIONS."""

    kernel: Any
    """The function that `triton.jit` decorates; its name ends with ``_kernel``."""
    signature: Mapping[str, str]
    """The type of each argument that is no constexpr: ``*bf16``, ``i32``. A suffix ``:16`` promises
    a multiple of 16, which Triton finds out by itself at a launch. An integer without it is one of
    the kernel's ``do_not_specialize``: Triton would make a constant of a 1 and compile again."""
    constexprs: Mapping[str, Constexpr]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = TARGETS
    """Compute capabilities, times ten, for which this is compiled."""


def launch(configuration: Configuration, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run ``configuration``'s kernel; what is compiled in advance is then what runs."""
    configuration.kernel[grid](
        *arguments,
        **configuration.constexprs,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )
