"""Apertus, whose layers have learnt the form of their activation."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm, QkNorm

_DEFAULTS = {
    "hidden_act": "xielu",
    "max_position_embeddings": 65_536,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 12_000_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
_NAMES = Names(
    layers=LayerNames(
        before_attention="attention_layernorm",
        before_feed_forward="feedforward_layernorm",
        gate_up=("mlp.up_proj",),
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, theta=12_000_000.0),
            qk_norm=QkNorm(norm=norm),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed_forward=config.mlp(is_gated=False),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
