"""EXAONE 4."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    window = model.size("attention.sliding_window", 0) or None
    return {
        **model.decoder(),
        "model_type": "exaone4",
        "sliding_window": window,
        "layer_types": model.layer_types(period=1 if window is None else 4),
    }


ARCHITECTURE = Architecture(name="exaone4", read=read)
