"""GLM 4 of 2025, with norms around both parts and half of each head rotated."""

from dataclasses import replace

from worker.model.config import Config
from worker.model.families import glm
from worker.model.spec import LayerNames, ModelSpec, Names, Norm

_NAMES = Names(
    layers=LayerNames(
        after_attention="post_self_attn_layernorm",
        after_feed_forward="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(glm.DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1.5625e-7))
    layer = replace(glm.layer(config, norm), after_attention=norm, after_feed_forward=norm)
    return config.model([layer] * config.num_layers, norm, _NAMES)
