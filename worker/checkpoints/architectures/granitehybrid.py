"""Granite 4 and Bamba, most of whose layers are Mamba 2 state spaces."""

from typing import Any

from worker.checkpoints.architectures.granite import factors
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """Bamba has positions, and neither factors nor experts."""
    counts = model.each("attention.head_count_kv")
    if model.get("rope.scaling.finetuned", True):
        return {
            **model.decoder(),
            **model.state_space(),
            "model_type": "bamba",
            "attn_layer_indices": [index for index, count in enumerate(counts) if count],
            "rope_parameters": model.partial_rope(),
        }
    num_experts = model.size("expert_count", 0)
    return {
        **model.decoder(),
        **factors(model),
        **model.state_space(),
        **(model.experts("num_local_experts") if num_experts else {"num_local_experts": 0}),
        **shared(model),
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "position_embedding_type": "nope",
    }


def shared(model: GgufModel) -> dict[str, Any]:
    """The size of what computes all tokens; without experts, it is the feed-forward part."""
    size = model.size("expert_shared_feed_forward_length", 0)
    return {"shared_intermediate_size": size or model.size("feed_forward_length")}


ARCHITECTURE = Architecture(name="granitehybrid", read=read, rotates_pairs=True)
