"""Qwen 3 with experts."""

from collections.abc import Mapping
from typing import Any

from worker.model.config import Config
from worker.model.families import qwen2_moe, qwen3
from worker.model.spec import Layer, ModelSpec, Names, Norm

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def read(
    config: Config, names: Names | None = None, defaults: Mapping[str, Any] = DEFAULTS
) -> ModelSpec:
    config = config.with_defaults(defaults)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    window = config.window() if config.flag("use_sliding_window") else None
    layers = [
        Layer(
            attention=qwen3.attention(config, norm, window),
            feed_forward=qwen2_moe.experts(config)
            if qwen2_moe.is_mixture(config, index)
            else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for index in range(config.num_layers)
    ]
    return config.model(layers, norm, names)
