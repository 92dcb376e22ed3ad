"""LFM2 with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel
from worker.checkpoints.architectures.lfm2 import convolutions


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **convolutions(model),
        **model.experts("num_experts"),
        "model_type": "lfm2_moe",
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "num_dense_layers": model.size("leading_dense_block_count", 0),
        "use_expert_bias": model.has("blk.exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


ARCHITECTURE = Architecture(name="lfm2moe", read=read)
