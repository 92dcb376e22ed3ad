"""GLM 4 of 2024, with half of each head rotated."""

from worker.model.config import Config
from worker.model.families.phi3 import NAMES as STORED_TOGETHER
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_NAMES = Names(layers=LayerNames(gate_up=STORED_TOGETHER.layers.gate_up))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1.5625e-7))
    return config.model([layer(config, norm)] * config.num_layers, norm, _NAMES)


def layer(config: Config, norm: Norm) -> Layer:
    return Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, is_partial=True, is_interleaved=True),
            has_qkv_bias=config.flag("attention_bias"),
        ),
        feed_forward=config.mlp(),
        before_attention=norm,
        before_feed_forward=norm,
    )
