"""Mistral, with a sliding window in all layers or in none."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read(config: Config, names: Names | None = None) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    # transformers reads a mistral with kinds of layers as a ministral.
    windows = config.windows(["sliding_attention"] * config.num_layers)
    layers = [
        Layer(
            attention=config.attention(window=window),
            feed_forward=config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for window in windows
    ]
    return config.model(layers, norm, names)
