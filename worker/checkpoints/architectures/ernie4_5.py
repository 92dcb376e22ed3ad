"""ERNIE 4.5 without experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    has_bias = model.has("blk.ffn_up.bias")
    return model.decoder() | {"model_type": "ernie4_5", "use_bias": has_bias}


ARCHITECTURE = Architecture(name="ernie4_5", read=read, rotates_pairs=True)
