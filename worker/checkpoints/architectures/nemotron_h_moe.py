"""Nemotron 3, Nemotron H with experts."""

from typing import Any

from worker.checkpoints.architectures import nemotron_h
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **nemotron_h.read(model),
        **model.routed_experts(),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "moe_shared_expert_intermediate_size": model.size("expert_shared_feed_forward_length"),
        "moe_latent_size": model.size("moe_latent_size", 0) or None,
    }


ARCHITECTURE = Architecture(name="nemotron_h_moe", read=read)
