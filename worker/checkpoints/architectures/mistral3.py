"""Mistral Small 3 and Ministral 3."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """Only Ministral's queries grow with their positions, which YaRN extends."""
    if not (growth := model.number("attention.temperature_scale", 0.0)):
        return model.decoder() | {"model_type": "mistral"}
    rope = model.yarn(scale=1.0) | {"llama_4_scaling_beta": growth}
    return model.decoder() | {"model_type": "ministral3", "rope_parameters": rope}


ARCHITECTURE = Architecture(name="mistral3", read=read, rotates_pairs=True)
