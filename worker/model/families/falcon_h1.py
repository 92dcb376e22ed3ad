"""Falcon H1, whose layers have attention and a Mamba 2 state space side by side."""

from math import prod

from worker.model.config import Config, NotNative
from worker.model.families import bamba
from worker.model.spec import Layer, Mamba2, ModelSpec, Multipliers, Norm

_DEFAULTS = bamba.DEFAULTS | {
    "max_position_embeddings": 8192,
    "partial_rotary_factor": None,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    of_inputs = config.number("attention_in_multiplier", 1.0)
    of_keys = config.number("key_multiplier", 1.0)
    has_bias = config.flag("attention_bias")
    if has_bias and of_inputs != 1:
        raise NotNative("the inputs of attention have a factor, and biases have none")
    of_gates, of_feed_forward = config.numbers("mlp_multipliers", (1.0, 1.0))
    layer = Layer(
        # A factor of the inputs multiplies queries, keys and values alike.
        attention=config.attention(
            scale=prod([config.head_dim**-0.5, of_keys, of_inputs, of_inputs]),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        recurrence=_state_space(config, norm),
        feed_forward=config.mlp(has_bias=config.flag("mlp_bias"), gate_multiplier=of_gates),
        before_attention=norm,
        before_feed_forward=norm,
        multipliers=Multipliers(
            attention=config.number("attention_out_multiplier", 1.0) * of_inputs,
            recurrence=config.number("ssm_out_multiplier", 1.0),
            feed_forward=of_feed_forward,
        ),
    )
    return config.model(
        [layer] * config.num_layers,
        norm,
        bamba.NAMES,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def _state_space(config: Config, norm: Norm) -> Mamba2:
    of_inputs = config.number("ssm_in_multiplier", 1.0)
    if config.flag("mamba_proj_bias") and of_inputs != 1:
        raise NotNative("the inputs of state spaces have a factor, and biases have none")
    gates, inputs, writes, reads, steps = (
        of_inputs * factor for factor in config.numbers("ssm_multipliers", (1.0,) * 5)
    )
    return bamba.state_space(
        config,
        norm if config.flag("mamba_rms_norm") else None,
        is_gated_last=config.flag("mamba_norm_before_gate"),
        has_output_bias=config.flag("projectors_bias"),
        factors=(gates, inputs, writes, reads, steps),
    )
