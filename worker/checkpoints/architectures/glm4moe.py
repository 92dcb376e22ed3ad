"""GLM 4.5 to 4.7, with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.experts("n_routed_experts"),
        "model_type": "glm4_moe",
        "rope_parameters": model.partial_rope(),
        "first_k_dense_replace": model.size("leading_dense_block_count", 0),
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "n_shared_experts": model.size("expert_shared_count"),
        "n_group": model.size("expert_group_count", 1),
        "topk_group": model.size("expert_group_used_count", 1),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "use_qk_norm": model.has("blk.attn_q_norm.weight"),
    }


ARCHITECTURE = Architecture(name="glm4moe", read=read)
