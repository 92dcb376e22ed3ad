"""MiniMax M2."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.experts("num_local_experts"),
        "model_type": "minimax_m2",
        "intermediate_size": model.size("expert_feed_forward_length"),
        "rope_parameters": model.partial_rope(),
    }


ARCHITECTURE = Architecture(name="minimax-m2", read=read)
