"""Mistral Small 4, with attention over latent vectors and experts."""

from typing import Any

from worker.checkpoints.architectures import deepseek2
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    growth = model.number("attention.temperature_scale", 0.1)
    return {
        **model.decoder(),
        **model.routed_experts(),
        **deepseek2.latent(model),
        "model_type": "mistral4",
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "rope_parameters": model.yarn(scale=0.1) | {"llama_4_scaling_beta": growth},
        "rope_interleave": True,
    }


ARCHITECTURE = Architecture(name="mistral4", read=read, rotates_pairs=True)
