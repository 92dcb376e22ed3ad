"""StarCoder 2, with layer norms and a feed-forward part without a gate."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "use_bias": True,
    "tie_word_embeddings": True,
}
_NAMES = Names(layers=LayerNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("norm_epsilon", 1e-5), kind="layer", has_bias=True)
    has_bias = config.flag("use_bias")
    layer = Layer(
        attention=config.attention(
            window=config.window(), has_qkv_bias=has_bias, has_output_bias=has_bias
        ),
        feed_forward=config.mlp(is_gated=False, has_bias=has_bias),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
