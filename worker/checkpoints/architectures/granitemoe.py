"""Granite 3 with experts."""

from typing import Any

from worker.checkpoints.architectures.granite import factors
from worker.checkpoints.architectures.granitehybrid import shared
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    config = model.decoder() | factors(model) | model.experts("num_local_experts")
    if not model.has("blk.ffn_gate_shexp.weight"):
        return config | {"model_type": "granitemoe"}
    return {
        **config,
        **shared(model),
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * model.num_layers,
        "position_embedding_type": "rope",
    }


ARCHITECTURE = Architecture(name="granitemoe", read=read, rotates_pairs=True)
