"""Granite 3 and 4 without experts and state spaces."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | factors(model) | {"model_type": "granite"}


def factors(model: GgufModel) -> dict[str, Any]:
    """The factors of Granite."""
    scale = model.number("attention.scale", 0.0)
    return {
        "attention_multiplier": scale or model.head_dim**-0.5,
        "embedding_multiplier": model.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": model.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": model.number("logit_scale", 1.0) or 1.0,
    }


ARCHITECTURE = Architecture(name="granite", read=read, rotates_pairs=True)
