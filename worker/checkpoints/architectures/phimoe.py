"""Phi 3.5 with experts."""

from typing import Any

from worker.checkpoints.architectures import phi3
from worker.checkpoints.architectures.interface import Architecture, GgufModel

_AMPLITUDE = 1.243163121016122
"""What LongRoPE multiplies rotated elements with in the published configurations. The file has
another number, which llama.cpp's converter takes from the lengths, as for Phi 3."""


def read(model: GgufModel) -> dict[str, Any]:
    config = phi3.read(model)
    length = config.pop("original_max_position_embeddings")
    amplitudes = {"short_mscale": _AMPLITUDE, "long_mscale": _AMPLITUDE}
    return {
        **config,
        **model.experts("num_local_experts"),
        "model_type": "phimoe",
        "rope_parameters": model.rope(original_max_position_embeddings=length, **amplitudes),
        "lm_head_bias": model.has("output.bias"),
    }


ARCHITECTURE = Architecture(name="phimoe", read=read)
