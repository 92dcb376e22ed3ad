"""GLM 4 of 2025, with norms around both parts and half of each head rotated."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_NAMES = Names(
    layers=LayerNames(
        after_attention="post_self_attn_layernorm",
        after_feed_forward="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1.5625e-7))
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, is_partial=True, is_interleaved=True),
            has_qkv_bias=config.flag("attention_bias"),
        ),
        feed_forward=config.mlp(),
        before_attention=norm,
        after_attention=norm,
        before_feed_forward=norm,
        after_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
