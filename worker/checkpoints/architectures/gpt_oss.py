"""gpt-oss."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.experts("num_local_experts"),
        "model_type": "gpt_oss",
        "intermediate_size": model.size("expert_feed_forward_length"),
        "sliding_window": model.size("attention.sliding_window"),
        "layer_types": model.layer_types(period=2),
        # The files do not say that the borders of the scaled frequencies are not rounded.
        "rope_parameters": model.rope(truncate=False),
    }


ARCHITECTURE = Architecture(name="gpt-oss", read=read)
