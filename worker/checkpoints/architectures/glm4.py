"""GLM 4 of 2025."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"model_type": "glm4", "rope_parameters": model.partial_rope()}


ARCHITECTURE = Architecture(name="glm4", read=read, rotates_pairs=True)
