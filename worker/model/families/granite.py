"""Granite, with factors of embeddings, attention, residual connections and logits."""

from worker.model.config import Config
from worker.model.spec import Experts, Layer, Mlp, ModelSpec, Multipliers, Names, Norm

_DEFAULTS = {"max_position_embeddings": 2048}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    return model(config, config.mlp(has_bias=config.flag("mlp_bias")))


def model(config: Config, feed_forward: Mlp | Experts, names: Names | None = None) -> ModelSpec:
    """A model with this feed-forward part in all layers."""
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(
            scale=config.number("attention_multiplier", 1.0),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed_forward=feed_forward,
        before_attention=norm,
        before_feed_forward=norm,
        multipliers=Multipliers.same(config.number("residual_multiplier", 1.0)),
    )
    return config.model(
        [layer] * config.num_layers,
        norm,
        names,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )
