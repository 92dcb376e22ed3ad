"""LFM2, most of whose layers are short convolutions."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | convolutions(model) | {"model_type": "lfm2"}


def convolutions(model: GgufModel) -> dict[str, Any]:
    """What LFM2 has with and without experts."""
    counts = model.each("attention.head_count_kv")
    return {
        "norm_eps": model.number("attention.layer_norm_rms_epsilon", 1e-5),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": model.size("shortconv.l_cache"),
        "conv_bias": model.has("blk.shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURE = Architecture(name="lfm2", read=read)
