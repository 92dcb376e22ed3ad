"""Qwen 3 with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.experts("num_experts"),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        # llama.cpp always normalizes weights.
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }


ARCHITECTURE = Architecture(name="qwen3moe", read=read)
