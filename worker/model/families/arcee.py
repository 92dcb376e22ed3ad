"""Arcee's models, a Llama whose feed-forward part has no gate."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096}
_NAMES = Names(layers=LayerNames(gate_up=("mlp.up_proj",)))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(has_qkv_bias=has_bias, has_output_bias=has_bias),
        feed_forward=config.mlp(is_gated=False, has_bias=config.flag("mlp_bias")),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
