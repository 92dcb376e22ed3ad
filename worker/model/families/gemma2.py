"""Gemma 2, with soft caps, norms around both parts, and a window in every other layer."""

from typing import Any

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "vocab_size": 256_000,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
NAMES = Names(layers=LayerNames(before_feed_forward="pre_feedforward_layernorm"))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6), adds_one=True)
    kinds = ["full_attention" if k % 2 else "sliding_attention" for k in range(config.num_layers)]
    layers = [
        layer(config, norm, window=window, softcap=config.get("attn_logit_softcapping"))
        for window in config.windows(kinds)
    ]
    return config.model(
        layers,
        norm,
        NAMES,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def layer(config: Config, norm: Norm, **attention: Any) -> Layer:
    """A layer whose attention has these fields besides the usual fields, with norms around both
    parts."""
    has_bias = config.flag("attention_bias")
    return Layer(
        attention=config.attention(
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            **attention,
        ),
        feed_forward=config.mlp(activation=config.activation("hidden_activation")),
        before_attention=norm,
        after_attention=norm,
        before_feed_forward=norm,
        after_feed_forward=norm,
    )
