"""OLMo 2, with norms after both parts, and of all heads of queries and keys together."""

from typing import Any

from worker.model.config import Config
from worker.model.spec import Attention, Layer, ModelSpec, Norm, QkNorm

_DEFAULTS = {"max_position_embeddings": 2048}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    layer = Layer(
        attention=attention(config, norm),
        feed_forward=config.mlp(),
        before_attention=None,
        after_attention=norm,
        after_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm)


def attention(config: Config, norm: Norm, **fields: Any) -> Attention:
    """Attention with these fields besides the usual fields."""
    has_bias = config.flag("attention_bias")
    return config.attention(
        qk_norm=QkNorm(norm=norm, over="all heads"),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        **fields,
    )
