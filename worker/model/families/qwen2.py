"""Qwen 2 and 2.5, with biases of queries, keys and values."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    layers = [
        Layer(
            attention=config.attention(window=window, has_qkv_bias=True),
            feed_forward=config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for window in windows(config)
    ]
    return config.model(layers, norm)


def windows(config: Config) -> list[int | None]:
    """The window of each layer: by default, the first layers have none."""
    if not config.flag("use_sliding_window"):
        return [None] * config.num_layers
    first = config.get("max_window_layers", 0)
    return config.windows(
        [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(config.num_layers)
        ]
    )
