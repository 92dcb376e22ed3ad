"""BLOOM."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        "model_type": "bloom",
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon", 1e-5),
    }


ARCHITECTURE = Architecture(name="bloom", read=read)
