"""The language model of Qwen 3.5 and 3.6."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel
from worker.checkpoints.architectures.qwen3next import linear_attention


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | linear_attention(model) | {"model_type": "qwen3_5_text"}


ARCHITECTURE = Architecture(name="qwen35", read=read, has_tiled_values=True)
