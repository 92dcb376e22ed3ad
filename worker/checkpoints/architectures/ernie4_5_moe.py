"""ERNIE 4.5 with experts."""

from typing import Any

from shared.errors import StartupError
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    if not model.has("blk.exp_probs_b.bias"):
        raise StartupError("the GGUF file's ernie4_5-moe has no exp_probs_b.bias")
    return {
        **model.decoder(),
        "model_type": "ernie4_5_moe",
        "use_bias": model.has("blk.ffn_up.bias"),
        "moe_num_experts": model.size("expert_count"),
        "moe_k": model.size("expert_used_count"),
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "moe_num_shared_experts": model.size("expert_shared_count", 0),
        "moe_layer_start_index": model.size("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": model.size("interleave_moe_layer_step"),
    }


ARCHITECTURE = Architecture(name="ernie4_5-moe", read=read, rotates_pairs=True)
