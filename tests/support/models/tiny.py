"""Tiny random models on disk, and their output according to transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
}


def write_tiny_model(
    directory: Path, model_type: str, *, max_shard_size: str = "1GB", **overrides: Any
) -> Any:
    """Write a model in which every weight matters, and return it as transformers' module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, **FAMILIES.get(model_type, {}), **overrides}
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    model = build(AutoConfig.for_model(model_type, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start as zeros and norms as ones, so that a decoder without them would pass.
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """The logits [len(token_ids), vocab_size] of one prompt, computed at once and without a
    cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
