"""SmolLM 3, a Llama with every fourth layer without positions."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    has_bias, every = config.flag("attention_bias"), config.size("no_rope_layer_interval")
    num_layers, rope = config.num_layers, config.rope(config.head_dim, theta=2e6)
    has_rope = config.get("no_rope_layers") or [(k + 1) % every for k in range(num_layers)]
    has_windows = config.flag("use_sliding_window") and config.window() is not None
    kinds = [
        "sliding_attention" if has_windows and is_rotated else "full_attention"
        for is_rotated in has_rope
    ]
    layers = [
        Layer(
            attention=config.attention(
                rope=rope if is_rotated else None,
                window=window,
                has_qkv_bias=has_bias,
                has_output_bias=has_bias,
            ),
            feed_forward=config.mlp(has_bias=config.flag("mlp_bias")),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for is_rotated, window in zip(has_rope, config.windows(kinds), strict=True)
    ]
    return config.model(layers, norm)
