"""Launch configurations of kernels, so that each can be compiled on a machine without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

Constexpr: TypeAlias = Any
"""A number, a word or None, or a function decorated with `triton.jit`."""

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
    """A specialization of a kernel; each module lists all that it launches as CONFIGURATIONS."""

    kernel: Any
    """A function decorated with `triton.jit`; its name ends with ``_kernel``."""
    signature: Mapping[str, str]
    """The type of each argument that is not a constexpr: ``*bf16``, ``i32``. The suffix ``:16``
    promises a multiple of 16, which Triton otherwise detects at launch. An integer without it is
    listed in the kernel's ``do_not_specialize``, because Triton would specialize on the value 1 and
    compile again."""
    constexprs: Mapping[str, Constexpr]
    """If HAS_PDL is among them and true, the kernel is launched before the previous kernel of the
    stream ends; see `has_pdl`."""
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = TARGETS
    """Compute capabilities, times ten, for which this is compiled."""


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch: compute capability 9.0 or higher.

    A kernel with HAS_PDL lets the next kernel start as soon as all its programs run, and each of
    its programs waits for the end of the previous kernel. Before that it may read only what no
    kernel of the same step writes, such as weights. No program may omit to wait, because the next
    kernel takes the end of this kernel for the end of all before it.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def tile_target(device: torch.device) -> int:
    """The entry of `TARGETS` whose tiles suit the device.

    A device that is neither Hopper nor a data-centre Blackwell has at least Ampere's instructions
    and 99 KiB of shared memory per thread block.
    """
    if device.type != "cuda":
        return 80
    return {9: 90, 10: 100, 11: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


def pdl_targets(is_used: bool) -> tuple[int, ...]:
    """The targets of a configuration with or without HAS_PDL."""
    return tuple(target for target in TARGETS if (target >= 90) == is_used)


def launch(configuration: Configuration, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run ``configuration``'s kernel, so that only kernels run that were compiled ahead of time."""
    # Triton's interpreter does not know the option.
    options = {"launch_pdl": True} if configuration.constexprs.get("HAS_PDL") else {}
    configuration.kernel[grid](
        *arguments,
        **configuration.constexprs,
        **options,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )
