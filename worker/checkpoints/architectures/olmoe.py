"""OLMoE."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    config = model.decoder() | model.experts("num_experts")
    return config | {"model_type": "olmoe", "norm_topk_prob": False, "clip_qkv": None}


ARCHITECTURE = Architecture(name="olmoe", read=read)
