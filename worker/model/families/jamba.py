"""Jamba, most of whose layers have a selective state space in place of attention, and some of whose
layers have experts."""

from dataclasses import replace

from kernels.router import Router
from worker.model.config import Config
from worker.model.families import bamba
from worker.model.families.mamba import rank_of
from worker.model.families.mamba2 import require_silu
from worker.model.spec import Experts, Layer, Mamba, ModelSpec, Norm

_DEFAULTS = {
    "vocab_size": 65_536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_NAMES = replace(
    bamba.NAMES,
    layers=replace(
        bamba.NAMES.layers,
        router="feed_forward.router",
        expert_gate_up=(
            "feed_forward.experts.{}.gate_proj",
            "feed_forward.experts.{}.up_proj",
        ),
        expert_down="feed_forward.experts.{}.down_proj",
    ),
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    attention, state_space = config.attention(rope=None), _state_space(config, norm)
    experts = Experts(
        count=config.size("num_experts"),
        expert=config.mlp(),
        router=Router(top_k=config.size("num_experts_per_tok"), scores="softmax"),
    )
    layers = [
        Layer(
            attention=attention if has_attention else None,
            recurrence=None if has_attention else state_space,
            feed_forward=experts if has_experts and experts.count > 1 else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for has_attention, has_experts in zip(
            _chosen(config, "attn_layer"), _chosen(config, "expert_layer"), strict=True
        )
    ]
    return config.model(layers, norm, _NAMES)


def _chosen(config: Config, key: str) -> list[bool]:
    """For each layer whether it is one of every ``period`` layers."""
    period, offset = config.size(f"{key}_period"), config.get(f"{key}_offset")
    return [index % period == offset for index in range(config.num_layers)]


def _state_space(config: Config, norm: Norm) -> Mamba:
    require_silu(config)
    return Mamba(
        size=config.size("mamba_expand") * config.size("hidden_size"),
        state_dim=config.size("mamba_d_state"),
        rank=rank_of(config, "mamba_dt_rank"),
        num_taps=config.size("mamba_d_conv"),
        norm=norm,
        has_bias=config.flag("mamba_proj_bias"),
        has_convolution_bias=config.flag("mamba_conv_bias"),
    )
