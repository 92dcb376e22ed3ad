"""Kimi Linear, most of whose layers are linear attention."""

from typing import Any

from worker.checkpoints.architectures import deepseek2
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    counts = model.each("attention.head_count_kv")
    num_dense = model.size("leading_dense_block_count", 0)
    return {
        **model.decoder(),
        **model.routed_experts(),
        **deepseek2.latent(model),
        "model_type": "kimi_linear",
        "num_local_experts": model.size("expert_count"),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "mlp_layer_types": [
            "dense" if index < num_dense else "sparse" for index in range(model.num_layers)
        ],
        "linear_num_heads": model.size("attention.head_count"),
        "linear_head_dim": model.size("kda.head_dim"),
        "linear_conv_kernel_dim": model.size("ssm.conv_kernel"),
    }


ARCHITECTURE = Architecture(name="kimi-linear", read=read)
