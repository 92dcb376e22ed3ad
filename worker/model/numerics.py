"""Identifies the arithmetic of a decoder, and limits the instructions that it uses."""

import os
from typing import TYPE_CHECKING, Literal, TypeAlias

from kernels.native.build import limit_variants

if TYPE_CHECKING:
    from worker.model.forward import Decoder

CpuIsa: TypeAlias = Literal["auto", "avx2", "avx512"]

_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""The libraries of torch read these variables when they are loaded."""


def limit_cpu_isa(isa: CpuIsa) -> None:
    """Use no instruction set beyond ``isa``. Call it before torch is imported."""
    if isa == "auto":
        return
    limit_variants(isa)
    if isa == "avx2":  # the default of these libraries is what the processor supports
        os.environ.update(dict.fromkeys(_VARIABLES, isa))


def numerics_of(decoder: "Decoder", *, is_batch_invariant: bool) -> str:
    """Names everything that affects the last bits of a logit, except for the weights.

    For example ``cpu fused bfloat16``, which is the same on every processor, or ``cpu avx2 native
    float32 reference``. Two workers with the same weights generate the same tokens only if their
    numerics are equal.
    """
    import torch

    parts = [decoder.traits.numerics, str(decoder.dtype).removeprefix("torch.")]
    if decoder.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(decoder.device)
        mode = ["batch-invariant"] if is_batch_invariant else []
        return " ".join(["cuda", f"sm{major}{minor}", *parts, decoder.provider, *mode])
    if decoder.traits.is_row_exact:
        return " ".join(["cpu", *parts])
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    return " ".join(["cpu", instructions, *parts, decoder.provider])
