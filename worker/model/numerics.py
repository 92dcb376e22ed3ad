"""Identifies the arithmetic of a decoder, and limits the instructions that it uses."""

import os
from typing import TYPE_CHECKING

from kernels.native.build import limit_variants

if TYPE_CHECKING:
    from worker.model.forward import Decoder

_LIMIT = "ATEN_CPU_CAPABILITY"
"""PyTorch's variable for the newest instruction set to use."""
_VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""The libraries of PyTorch read these variables when they are loaded, and not PyTorch's own."""
_AVX2 = "avx2"
INT8_INPUTS = "int8"
"""The part of the name of arithmetic that rounds the inputs of quantized weights to 8 bits."""
PLANES = "planes"
"""The part of the name of arithmetic that multiplies by weights in planes of bits on a GPU."""
_FUSED = "fused"
"""The part of the name of the native decoder's arithmetic."""
_FLOAT8_CACHE = "kv-float8"
"""The part of the name of arithmetic whose keys and values are rounded to 8 bits."""


def kv_dtype_of(numerics: str) -> str:
    """The setting ``kv_dtype`` of a worker with numerics of this name."""
    return "float8" if _FLOAT8_CACHE in numerics.split() else "auto"


def kernels_of(numerics: str) -> str:
    """The setting ``kernels`` with which a CPU computes as a worker with numerics of this name."""
    parts = numerics.split()
    return "native-int16" if _FUSED in parts and INT8_INPUTS not in parts else "auto"


def limit_cpu_isa() -> None:
    """Use no instruction set beyond AVX2, in the native kernels and in PyTorch's libraries, if
    PyTorch is told not to. Call it before torch is imported."""
    if os.environ.get(_LIMIT, "").lower() == _AVX2:
        limit_variants(_AVX2)
        os.environ.update(dict.fromkeys(_VARIABLES, _AVX2))


def numerics_of(decoder: "Decoder", *, is_batch_invariant: bool) -> str:
    """Names everything that affects the last bits of a logit, except for the weights.

    For example ``cpu fused bfloat16``, which is the same on every processor, or ``cpu avx2 native
    float32 reference``. Two workers with the same weights generate the same tokens only if their
    numerics are equal.
    """
    import torch

    parts = [decoder.traits.numerics, str(decoder.dtype).removeprefix("torch.")]
    if decoder.cache_dtype != decoder.dtype:
        parts.append(_FLOAT8_CACHE)
    if decoder.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(decoder.device)
        mode = ["batch-invariant"] if is_batch_invariant else []
        return " ".join(["cuda", f"sm{major}{minor}", *parts, decoder.provider, *mode])
    if decoder.traits.is_row_exact:
        return " ".join(["cpu", *parts])
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    return " ".join(["cpu", instructions, *parts, decoder.provider])
