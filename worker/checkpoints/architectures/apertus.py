"""Apertus, whose layers have learnt the form of their activation."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"model_type": "apertus", "hidden_act": "xielu"}


ARCHITECTURE = Architecture(name="apertus", read=read)
