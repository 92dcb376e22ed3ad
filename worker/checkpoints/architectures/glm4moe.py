"""GLM 4.5 to 4.7, with experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **model.routed_experts(),
        "model_type": "glm4_moe",
        "rope_parameters": model.partial_rope(),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "use_qk_norm": model.has("blk.attn_q_norm.weight"),
    }


ARCHITECTURE = Architecture(name="glm4moe", read=read)
