"""Seed-OSS, a Llama whose biases are configured apart."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    layer = Layer(
        attention=config.attention(
            has_qkv_bias=config.flag("attention_bias"),
            has_output_bias=config.flag("attention_out_bias"),
        ),
        feed_forward=config.mlp(has_bias=config.flag("mlp_bias")),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm)
