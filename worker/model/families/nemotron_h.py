"""Nemotron H and Nemotron 3, each of whose layers is a Mamba 2 state space, attention, or a
feed-forward part, with or without experts."""

from dataclasses import replace
from typing import Any

from shared.errors import StartupError
from worker.model.config import Config
from worker.model.families import glm4_moe, mamba2
from worker.model.families.mamba2 import require_silu
from worker.model.spec import Experts, Layer, LayerNames, Mamba2, Mlp, ModelSpec, Names, Norm

_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_NAMES = Names(
    layers=LayerNames(
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        attention_output="mixer.o_proj",
        state_space=mamba2.NAMES.layers.state_space,
        before_attention="norm",
        before_feed_forward="norm",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        router="mixer.gate",
        correction="mixer.gate.e_score_correction_bias",
        expert_gate_up=("mixer.experts.{}.up_proj",),
        expert_down="mixer.experts.{}.down_proj",
        shared_gate_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        latent_down="mixer.fc1_latent_proj",
        latent_up="mixer.fc2_latent_proj",
    ),
    prefixes=("backbone.", "model."),
    embedding="embeddings",
    final_norm="norm_f",
)
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The kinds of layers in ``hybrid_override_pattern``."""
_NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""The names that transformers writes."""


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("layer_norm_epsilon", 1e-5))
    layers = [Layer(**_part(config, kind, norm)) for kind in _kinds(config)]
    # Layers that predict several tokens at once are a model of their own.
    names = replace(_NAMES, is_within=bool(config.get("num_nextn_predict_layers")))
    return config.model(layers, norm, names)


def _kinds(config: Config) -> list[str]:
    stated = config.get("layers_block_type") or config.get("hybrid_override_pattern", "ME*-")
    names = _LETTERS if isinstance(stated, str) else _NEW_NAMES
    kinds = [names.get(kind, kind) for kind in stated]
    if not set(kinds) <= set(_LETTERS.values()):
        raise StartupError(f"the model's config.json says layers of the kinds {stated!r}")
    return kinds


def _part(config: Config, kind: str, norm: Norm) -> dict[str, Any]:
    """The only part of a layer, and the norm before it, as fields of `Layer`."""
    if kind == "mamba":
        return {"before_attention": norm, "recurrence": _state_space(config, norm)}
    if kind == "attention":
        return {"before_attention": norm, "attention": config.attention(rope=None)}
    part = _mlp(config, "intermediate_size") if kind == "mlp" else _experts(config)
    return {"before_feed_forward": norm, "feed_forward": part}


def _state_space(config: Config, norm: Norm) -> Mamba2:
    require_silu(config, "mamba_hidden_act")
    return Mamba2(
        num_heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        num_groups=config.size("n_groups"),
        state_dim=config.size("ssm_state_size"),
        num_taps=config.size("conv_kernel"),
        norm=norm,
        least_step=config.number("time_step_min", 0.001),
        has_bias=config.flag("use_bias"),
        has_output_bias=config.flag("use_bias"),
        has_convolution_bias=config.flag("use_conv_bias"),
    )


def _mlp(config: Config, size: str) -> Mlp:
    activation, has_bias = config.activation("mlp_hidden_act"), config.flag("mlp_bias")
    return config.mlp(size, activation=activation, is_gated=False, has_bias=has_bias)


def _experts(config: Config) -> Experts:
    stated = config.get("moe_latent_size")
    return replace(
        glm4_moe.experts_of(config),
        expert=replace(_mlp(config, "moe_intermediate_size"), has_bias=False),
        shared=_mlp(config, "moe_shared_expert_intermediate_size"),
        latent_size=None if stated is None else config.size("moe_latent_size"),
        has_latent_bias=config.flag("mlp_bias"),
    )
