"""Mamba and Falcon Mamba."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """Only Falcon's normalizes what is made of the inputs."""
    is_falcon = bool(model.get("ssm.dt_b_c_rms"))
    eps = model.number("attention.layer_norm_rms_epsilon", 1e-5)
    return {
        **model.decoder(),
        "model_type": "falcon_mamba" if is_falcon else "mamba",
        "layer_norm_epsilon": eps,
        "mixer_rms_eps": eps,
        "intermediate_size": model.size("ssm.inner_size"),
        "state_size": model.size("ssm.state_size"),
        "time_step_rank": model.size("ssm.time_step_rank"),
        "conv_kernel": model.size("ssm.conv_kernel"),
        "use_bias": model.has("blk.ssm_in.bias"),
        "use_conv_bias": model.has("blk.ssm_conv1d.bias"),
    }


ARCHITECTURE = Architecture(name="mamba", read=read)
