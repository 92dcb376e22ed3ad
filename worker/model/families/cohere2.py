"""Command R7B and its relatives: both parts have the same input, and windows have positions."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("layer_norm_eps", 1e-5), kind="layer")
    has_bias, rope = (
        config.flag("attention_bias"),
        config.rope(config.head_dim, is_interleaved=True),
    )
    every = config.get("sliding_window_pattern", 4)
    kinds = [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(config.num_layers)
    ]
    layers = [
        Layer(
            attention=config.attention(
                rope=None if window is None else rope,
                window=window,
                has_qkv_bias=has_bias,
                has_output_bias=has_bias,
            ),
            feed_forward=config.mlp(),
            before_attention=norm,
            is_parallel=True,
        )
        for window in config.windows(kinds)
    ]
    return config.model(layers, norm, logit_scale=config.number("logit_scale"))
