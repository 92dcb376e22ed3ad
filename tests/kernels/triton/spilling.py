"""A kernel that may need more registers than there are, as a planted fault for compile checks."""

import triton
import triton.language as tl

from kernels.triton.configurations import Configuration


@triton.jit(do_not_specialize=["size"])
def centre_kernel(values_ptr, centred_ptr, size, PADDED_SIZE: tl.constexpr):
    """Subtract the mean of all values from each of them, in a single program."""
    places = tl.arange(0, PADDED_SIZE)
    values = tl.load(values_ptr + places, mask=places < size, other=0.0)
    tl.store(centred_ptr + places, values - tl.sum(values) / size, mask=places < size)


_SIGNATURE = {"values_ptr": "*fp32:16", "centred_ptr": "*fp32:16", "size": "i32"}
CONFIGURATIONS = [
    Configuration(centre_kernel, _SIGNATURE, {"PADDED_SIZE": size}, num_warps=1, targets=(90,))
    for size in (1024, 8192)
]
