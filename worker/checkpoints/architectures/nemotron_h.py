"""Nemotron H, each of whose layers is a Mamba 2 state space, attention, or a feed-forward part."""

from collections.abc import Mapping
from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel

_TENSORS: Mapping[str, str] = {
    "mamba": "ssm_in",
    "attention": "attn_output",
    "mlp": "ffn_up",
    "moe": "ffn_gate_inp",
}
"""What only layers of each kind have."""


def read(model: GgufModel) -> dict[str, Any]:
    space = model.state_space()
    eps = model.number("attention.layer_norm_epsilon", 1e-5)
    return {
        **model.decoder(),
        "model_type": "nemotron_h",
        "layers_block_type": [
            kind
            for index in range(model.num_layers)
            for kind, part in _TENSORS.items()
            if model.has(f"blk.{index}.{part}.weight")
        ],
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon", eps),
        "mlp_hidden_act": "relu2",
        "mlp_bias": model.has("blk.ffn_up.bias") or model.has("blk.ffn_up_shexp.bias"),
        "mamba_num_heads": space["mamba_n_heads"],
        "mamba_head_dim": space["mamba_d_head"],
        "n_groups": space["mamba_n_groups"],
        "ssm_state_size": space["mamba_d_state"],
        "conv_kernel": space["mamba_d_conv"],
        "use_conv_bias": space["mamba_conv_bias"],
        "use_bias": space["mamba_proj_bias"],
    }


ARCHITECTURE = Architecture(name="nemotron_h", read=read)
