"""Random blocks in each of ggml's formats, and of scaled floats."""

import torch

from kernels.quantized import BLOCK_SIZES, QuantizedWeight
from kernels.scaled_floats import GROUPS

SCALES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
}
"""Where a block has numbers of float16."""


def random_blocks(block_format: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    """Codes and scales of all values, without scales that are infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = BLOCK_SIZES[block_format]
    shape = (outputs, inputs // size.inputs, size.num_bytes)
    blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for at in SCALES.get(block_format, ()):
        scales = torch.randn(*shape[:2], 1, generator=generator).mul(0.01).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    if block_format == "mxfp4":
        blocks[..., 0] = torch.randint(110, 130, shape[:2], generator=generator)
    if block_format == "nvfp4":
        blocks[..., :4] &= 0x77  # no NaN, and no sign
    if block_format == "iq1_m":
        blocks[..., 48:56] &= 0x0F  # the bits of its scale are spread over them
    if block_format in GROUPS:
        scales = torch.randn(*shape[:2], 1, generator=generator).mul(0.01)
        blocks[..., :4] = scales.view(torch.uint8)
    if block_format == "float8":
        codes = blocks[..., 4:]
        codes[(codes & 127) == 127] = 0  # NaN
    return QuantizedWeight(block_format, blocks)
