"""Gemma 2."""

import math
from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel

_LARGEST = 46
"""The number of layers of the model of 27B, whose scores have a scale of their own."""


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": model.size("attention.sliding_window", 4096),
        "layer_types": model.layer_types(period=2),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": score_size(model, _LARGEST),
    }


def score_size(model: GgufModel, largest: int) -> float:
    """The square root of this number divides scores, which files do not say."""
    if model.num_layers != largest:
        return model.head_dim
    return math.floor(model.size("embedding_length") / model.size("attention.head_count"))


ARCHITECTURE = Architecture(name="gemma2", read=read)
