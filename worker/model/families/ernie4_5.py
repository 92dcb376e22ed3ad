"""ERNIE 4.5 without experts."""

from worker.model.config import Config
from worker.model.spec import Attention, Layer, ModelSpec, Norm

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    layer = Layer(
        attention=attention(config),
        feed_forward=config.mlp(has_bias=config.flag("use_bias")),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm)


def attention(config: Config) -> Attention:
    has_bias = config.flag("use_bias")
    return config.attention(
        rope=config.rope(config.head_dim, theta=500_000.0, is_interleaved=True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
