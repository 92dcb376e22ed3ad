"""Seed-OSS."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    has_bias = model.has("blk.attn_output.bias")
    return model.decoder() | {"model_type": "seed_oss", "attention_out_bias": has_bias}


ARCHITECTURE = Architecture(name="seed_oss", read=read)
