"""The language model of Gemma 3."""

from typing import Any

from worker.checkpoints.architectures.gemma2 import score_size
from worker.checkpoints.architectures.interface import Architecture, GgufModel

_LARGEST = 62
"""The number of layers of the model of 27B."""


def read(model: GgufModel) -> dict[str, Any]:
    has_windows = bool(model.size("attention.sliding_window", 0))
    local = model.number("rope.freq_base_swa", 10_000.0)
    return {
        **model.decoder(),
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": model.size("attention.sliding_window", 0) or None,
        "layer_types": model.layer_types(period=6 if has_windows else 1),
        "rope_parameters": {
            "full_attention": model.rope(rope_theta=model.number("rope.freq_base", 1_000_000.0)),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": model.get("final_logit_softcapping"),
        "query_pre_attn_scalar": score_size(model, _LARGEST),
    }


ARCHITECTURE = Architecture(name="gemma3", read=read)
