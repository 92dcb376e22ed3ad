"""The language model of Qwen 3 VL."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"model_type": "qwen3", "use_sliding_window": False}


ARCHITECTURE = Architecture(name="qwen3vl", read=read)
