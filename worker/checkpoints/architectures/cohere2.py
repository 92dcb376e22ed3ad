"""Command R7B and its relatives."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        "model_type": "cohere2",
        "layer_norm_eps": model.number("attention.layer_norm_epsilon", 1e-5),
        "sliding_window": model.size("attention.sliding_window"),
        "layer_types": model.layer_types(period=4),
        "logit_scale": model.number("logit_scale", 0.0625),
    }


ARCHITECTURE = Architecture(name="cohere2", read=read, rotates_pairs=True)
