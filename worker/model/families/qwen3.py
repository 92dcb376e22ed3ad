"""Qwen 3, with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from worker.model.config import Config
from worker.model.families import qwen2
from worker.model.spec import Attention, Layer, ModelSpec, Names, Norm, QkNorm

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def read(
    config: Config, names: Names | None = None, defaults: Mapping[str, Any] = DEFAULTS
) -> ModelSpec:
    config = config.with_defaults(defaults)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    layers = [
        Layer(
            attention=attention(config, norm, window),
            feed_forward=config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for window in qwen2.windows(config)
    ]
    return config.model(layers, norm, names)


def attention(config: Config, norm: Norm, window: int | None) -> Attention:
    has_bias = config.flag("attention_bias")
    return config.attention(
        window=window,
        qk_norm=QkNorm(norm=norm),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
