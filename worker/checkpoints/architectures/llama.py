"""Llama, Mistral and Mixtral."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any] | None:
    """Only Mixtral has experts."""
    if not model.size("expert_count", 0):
        return None
    return model.decoder() | model.experts("num_local_experts") | {"model_type": "mixtral"}


ARCHITECTURE = Architecture(name="llama", read=read, rotates_pairs=True)
