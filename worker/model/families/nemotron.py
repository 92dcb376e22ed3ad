"""Nemotron 4 and Minitron, with layer norms, and half of each head rotated."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}
_NAMES = Names(layers=LayerNames(gate_up=("mlp.up_proj",)))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    eps = config.number("norm_eps", 1e-5)
    norm = Norm(eps=eps, kind="layer", adds_one=True, has_bias=True)
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, is_partial=True),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed_forward=config.mlp(is_gated=False, has_bias=config.flag("mlp_bias")),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
