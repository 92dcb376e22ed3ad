"""Qwen3-Next, most of whose layers are linear attention."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        **linear_attention(model),
        **mixture(model),
        "model_type": "qwen3_next",
    }


def linear_attention(model: GgufModel) -> dict[str, Any]:
    """What Qwen3-Next and Qwen 3.5 have in common."""
    num_values = model.size("ssm.time_step_rank")
    every = model.size("full_attention_interval", 4)
    default = tuple((index + 1) % every for index in range(model.num_layers))
    recurrent = model.get("attention.recurrent_layers", default)[: model.num_layers]
    return {
        "rope_parameters": model.partial_rope(),
        "linear_conv_kernel_dim": model.size("ssm.conv_kernel"),
        "linear_key_head_dim": model.size("ssm.state_size"),
        "linear_value_head_dim": model.size("ssm.inner_size") // max(1, num_values),
        "linear_num_key_heads": model.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
    }


def mixture(model: GgufModel) -> dict[str, Any]:
    """The experts of both."""
    layers = range(model.num_layers)
    return {
        **model.experts("num_experts"),
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [k for k in layers if not model.has(f"blk.{k}.ffn_gate_inp.weight")],
    }


ARCHITECTURE = Architecture(name="qwen3next", read=read)
