"""Bamba, most of whose layers have a Mamba 2 state space in place of attention."""

from math import inf
from typing import Any

from worker.model.config import Config
from worker.model.families.mamba2 import require_silu
from worker.model.spec import Layer, LayerNames, Mamba2, ModelSpec, Names, Norm

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "partial_rotary_factor": 0.5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
NAMES = Names(
    layers=LayerNames(
        before_feed_forward="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    final_norm="final_layernorm",
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    indices = config.get("attn_layer_indices", ())
    has_bias = config.flag("attention_bias")
    attention = config.attention(
        rope=config.rope(config.head_dim, is_partial=True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    layers = [
        Layer(
            attention=attention if index in indices else None,
            recurrence=None if index in indices else state_space(config, norm),
            feed_forward=config.mlp(has_bias=config.flag("mlp_bias")),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for index in range(config.num_layers)
    ]
    return config.model(layers, norm, NAMES)


def state_space(config: Config, norm: Norm | None, **overrides: Any) -> Mamba2:
    """The recurrence that these keys describe; ``overrides`` are fields of `Mamba2`."""
    require_silu(config)
    num_heads = config.size("mamba_n_heads")
    size = config.size("mamba_d_ssm", config.size("mamba_expand") * config.size("hidden_size"))
    is_automatic = config.get("mamba_d_head", "auto") == "auto"
    least_step, greatest_step = config.numbers("time_step_limit", (0.0, inf))
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": size // num_heads if is_automatic else config.size("mamba_d_head"),
        "num_groups": config.size("mamba_n_groups"),
        "state_dim": config.size("mamba_d_state"),
        "num_taps": config.size("mamba_d_conv"),
        "norm": norm,
        "least_step": least_step,
        "greatest_step": greatest_step,
        "has_bias": config.flag("mamba_proj_bias"),
        "has_output_bias": config.flag("mamba_proj_bias"),
        "has_convolution_bias": config.flag("mamba_conv_bias"),
    }
    return Mamba2(**fields | overrides)
