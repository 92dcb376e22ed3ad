"""OLMo 2 and 3."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    window = model.size("attention.sliding_window", 0) or None
    if window is None:
        return model.decoder() | {"model_type": "olmo2"}
    return {
        **model.decoder(),
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": model.layer_types(period=4),
        "rope_parameters": {
            "full_attention": model.rope(),
            "sliding_attention": model.rope(),
        },
    }


ARCHITECTURE = Architecture(name="olmo2", read=read)
