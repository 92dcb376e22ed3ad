"""Phi 3 and Phi 4, whose matrices are stored together, with LongRoPE."""

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
NAMES = Names(layers=LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, is_partial=True), window=config.window()
        ),
        feed_forward=config.mlp(),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, NAMES)
