"""Hunyuan without experts: the norms of heads come after the positions."""

from dataclasses import replace

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm, QkNorm, Rope

_DEFAULTS = {"max_position_embeddings": 2048}
_NAMES = Names(
    layers=LayerNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(
            rope=_stretched(config.rope(config.head_dim)),
            qk_norm=QkNorm(norm=norm, is_after_rope=True),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed_forward=config.mlp(),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)


def _stretched(rope: Rope) -> Rope:
    """Checkpoints that call their positions dynamic have a fixed ``alpha``, which stretches the
    base."""
    parameters = dict(rope.parameters)
    alpha = parameters.get("alpha")
    if parameters["rope_type"] == "dynamic" and alpha:
        theta = parameters["rope_theta"] * alpha ** (rope.dim / (rope.dim - 2))
        parameters |= {"rope_type": "default", "rope_theta": theta}
    return replace(rope, parameters=parameters)
