"""Gemma, whose embeddings are scaled and whose norms multiply with 1 + w."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "vocab_size": 256_000,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6), adds_one=True)
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(has_qkv_bias=has_bias, has_output_bias=has_bias),
        # The first checkpoints say gelu, and mean its approximation.
        feed_forward=config.mlp(activation="gelu_tanh"),
        before_attention=norm,
        before_feed_forward=norm,
    )
    scale = config.size("hidden_size") ** 0.5
    return config.model([layer] * config.num_layers, norm, embedding_scale=scale)
