"""Nemotron 4 and Minitron."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        "model_type": "nemotron",
        "norm_eps": model.number("attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "relu2",
        "rope_parameters": model.partial_rope(),
    }


ARCHITECTURE = Architecture(name="nemotron", read=read)
