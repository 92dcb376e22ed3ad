"""Mamba 2."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    space = model.state_space()
    return {
        **model.decoder(),
        "model_type": "mamba2",
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon", 1e-5),
        "expand": space["mamba_expand"],
        "num_heads": space["mamba_n_heads"],
        "head_dim": space["mamba_d_head"],
        "n_groups": space["mamba_n_groups"],
        "state_size": space["mamba_d_state"],
        "conv_kernel": space["mamba_d_conv"],
        "use_bias": model.has("blk.ssm_in.bias"),
        "use_conv_bias": model.has("blk.ssm_conv1d.bias"),
    }


ARCHITECTURE = Architecture(name="mamba2", read=read)
