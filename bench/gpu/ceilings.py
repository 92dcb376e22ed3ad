"""The limits of the device, measured with a large copy and a large product of random matrices."""

import torch

from bench.gpu.figures import Ceilings, Figure, median_ms
from bench.gpu.scale import Scale


def measure(scale: Scale, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The bytes of a copy count twice, because they are read and written."""
    source = torch.randint(256, (scale.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    size = scale.matmul_size
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    product_ms = median_ms(lambda: torch.mm(left, right, out=out), device)
    return Ceilings(
        bytes_per_s=2 * scale.copy_bytes / copy_ms * 1e3,
        flops_per_s=2 * size**3 / product_ms * 1e3,
    )


def figures(found: Ceilings) -> list[Figure]:
    return [
        Figure(section="device", name="copy", value=found.bytes_per_s / 1e12, unit="TB/s"),
        Figure(section="device", name="matmul", value=found.flops_per_s / 1e12, unit="TFLOP/s"),
    ]
