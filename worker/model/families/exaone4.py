"""EXAONE 4: norms after both parts; the large model has positions only where it has windows."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm, QkNorm

_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    rope, window, every = config.rope(config.head_dim), config.window(), _every(config)
    kinds = [
        "sliding_attention" if window is not None and (layer + 1) % every else "full_attention"
        for layer in range(config.num_layers)
    ]
    layers = [
        Layer(
            attention=config.attention(
                rope=rope if window is None or own is not None else None,
                window=own,
                qk_norm=QkNorm(norm=norm),
            ),
            feed_forward=config.mlp(),
            before_attention=None,
            after_attention=norm,
            after_feed_forward=norm,
        )
        for own in config.windows(kinds)
    ]
    return config.model(layers, norm)


def _every(config: Config) -> int:
    """One in so many layers has no window; the large model writes the pattern as LLLG."""
    pattern = config.get("sliding_window_pattern")
    return pattern if isinstance(pattern, int) and pattern else len(str(pattern))
