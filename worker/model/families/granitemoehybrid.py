"""Granite 4, most of whose layers have a Mamba 2 state space in place of attention, with or without
experts."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.families.bamba import state_space
from worker.model.spec import (
    Experts,
    Layer,
    LayerNames,
    Mlp,
    ModelSpec,
    Multipliers,
    Names,
    Norm,
)

_DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_SHARED = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
_NAMES = Names(
    layers=LayerNames(
        gate_up=(_SHARED["gate_up"],),
        down=_SHARED["down"],
        router="block_sparse_moe.router.layer",
        expert_gate_up=("block_sparse_moe.input_linear.weight",),
        expert_down="block_sparse_moe.output_linear.weight",
        shared_gate_up=(_SHARED["gate_up"],),
        shared_down=_SHARED["down"],
    )
)
_RECURRENT = ("mamba", "linear_attention")
"""The name of the layers in published checkpoints, and the name that transformers writes."""


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    has_bias = config.flag("attention_bias")
    has_positions = config.get("position_embedding_type") == "rope"
    attention = config.attention(
        scale=config.number("attention_multiplier", 1.0),
        rope=config.rope(config.head_dim) if has_positions else None,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    multiplier = config.number("residual_multiplier", 1.0)
    layers = [
        Layer(
            attention=None if kind in _RECURRENT else attention,
            recurrence=state_space(config, norm) if kind in _RECURRENT else None,
            feed_forward=_feed_forward(config),
            before_attention=norm,
            before_feed_forward=norm,
            multipliers=Multipliers.same(multiplier),
        )
        for kind in config.kinds([_RECURRENT[0]] * config.num_layers, [*_RECURRENT, "attention"])
    ]
    return config.model(
        layers,
        norm,
        _NAMES,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


def _feed_forward(config: Config) -> Mlp | Experts:
    shared = config.mlp("shared_intermediate_size")
    count = config.get("num_local_experts", 8)
    if count == 0:
        return shared
    return Experts(
        count=config.size("num_local_experts", count),
        expert=config.mlp(),
        router=Router(top_k=config.size("num_experts_per_tok"), scores="softmax of chosen"),
        shared=shared,
    )
