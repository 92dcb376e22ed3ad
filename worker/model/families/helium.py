"""Helium, a Llama that rotates adjacent elements."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-8))
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, theta=100_000.0, is_interleaved=True),
            has_qkv_bias=config.flag("attention_bias"),
        ),
        feed_forward=config.mlp(has_bias=config.flag("mlp_bias")),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm)
