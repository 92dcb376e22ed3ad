"""Launch configurations of kernels, so that each can be compiled on a machine without a GPU."""

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
"""Compiled ahead of time; float16 uses the same registers and memory as bfloat16."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One specialization of a kernel; each module lists all that it launches as CONFIGURATIONS."""

    kernel: Any
    """A function decorated with `triton.jit`; its name ends with ``_kernel``."""
    signature: Mapping[str, str]
    """The type of each argument that is not a constexpr: ``*bf16``, ``i32``. The suffix ``:16``
    promises a multiple of 16, which Triton otherwise detects at launch. An integer without it is
    listed in the kernel's ``do_not_specialize``, because Triton would specialize on the value 1 and
    compile again."""
    constexprs: Mapping[str, Constexpr]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = TARGETS
    """Compute capabilities, times ten, for which this is compiled."""


def launch(configuration: Configuration, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run ``configuration``'s kernel, so that the kernels that run are those compiled ahead of
    time."""
    configuration.kernel[grid](
        *arguments,
        **configuration.constexprs,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )
