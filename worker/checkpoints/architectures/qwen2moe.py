"""Qwen 1.5 and 2 with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.experts("num_experts"),
        "model_type": "qwen2_moe",
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.size("expert_shared_feed_forward_length"),
        # llama.cpp normalizes no weights.
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "qkv_bias": model.has("blk.attn_q.bias"),
    }


ARCHITECTURE = Architecture(name="qwen2moe", read=read)
