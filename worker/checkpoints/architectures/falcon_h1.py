"""Falcon H1, whose layers have attention and a Mamba 2 state space side by side."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """The file's tensors have been multiplied with the factors of the configuration."""
    return {
        **model.decoder(),
        **model.state_space(),
        "model_type": "falcon_h1",
        "mamba_d_ssm": model.size("ssm.inner_size"),
        "mamba_rms_norm": model.has("blk.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": model.has("blk.ssm_out.bias"),
    }


ARCHITECTURE = Architecture(name="falcon-h1", read=read)
