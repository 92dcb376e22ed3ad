"""Gemma."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


ARCHITECTURE = Architecture(name="gemma", read=read)
