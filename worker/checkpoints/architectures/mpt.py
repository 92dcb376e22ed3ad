"""MPT."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """A file of a model with learnt positions says that the greatest slope is 0."""
    greatest = model.number("attention.max_alibi_bias", 0.0)
    return {
        **model.decoder(),
        "model_type": "mpt",
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon", 1e-5),
        "attn_config": {
            "alibi": greatest > 0,
            "alibi_bias_max": int(greatest),
            "clip_qkv": model.number("attention.clamp_kqv", 0.0) or None,
        },
    }


ARCHITECTURE = Architecture(name="mpt", read=read)
