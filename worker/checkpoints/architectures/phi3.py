"""Phi 3, Phi 4 and Phi 4 mini."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """The factors of LongRoPE are tensors of the file."""
    length = model.size("context_length")
    return {
        **model.decoder(),
        "model_type": "phi3",
        "sliding_window": model.size("attention.sliding_window", 0) or None,
        "rope_parameters": model.partial_rope(),
        "original_max_position_embeddings": model.size(
            "rope.scaling.original_context_length", length
        ),
    }


ARCHITECTURE = Architecture(name="phi3", read=read)
