"""Arcee's AFM."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"model_type": "arcee", "hidden_act": "relu2"}


ARCHITECTURE = Architecture(name="arcee", read=read, rotates_pairs=True)
