"""The language model of Qwen 3.5 and 3.6 with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel
from worker.checkpoints.architectures.qwen3next import linear_attention, mixture


def read(model: GgufModel) -> dict[str, Any]:
    config = model.decoder() | linear_attention(model) | mixture(model)
    return config | {"model_type": "qwen3_5_moe_text"}


ARCHITECTURE = Architecture(name="qwen35moe", read=read, has_tiled_values=True)
