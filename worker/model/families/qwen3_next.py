"""Qwen3-Next: three of four layers are linear attention by the gated delta rule, all layers have
experts, and attention has a gate."""

from collections.abc import Sequence
from dataclasses import replace

from shared.errors import StartupError
from worker.model.config import Config
from worker.model.families import qwen2_moe
from worker.model.spec import (
    DeltaNames,
    DeltaNet,
    Experts,
    Layer,
    LayerNames,
    Mlp,
    ModelSpec,
    Names,
    Norm,
    Predictor,
    QkNorm,
)

DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
_NAMES = Names(
    layers=LayerNames(
        delta=DeltaNames(inputs=("linear_attn.in_proj_qkvz",), rates=("linear_attn.in_proj_ba",))
    ),
    # The predictor has names of its own.
    is_within=True,
)
_LINEAR = "linear_attention"


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    experts = mixture(config)
    parts = [
        experts if qwen2_moe.is_mixture(config, index) else config.mlp()
        for index in range(config.num_layers)
    ]
    return hybrid(config, parts, _NAMES)


def mixture(config: Config) -> Experts:
    """The experts of a layer, with a shared expert that has a gate."""
    return qwen2_moe.experts(config, shared=config.mlp("shared_expert_intermediate_size"))


def hybrid(config: Config, feed_forwards: Sequence[Mlp | Experts], names: Names) -> ModelSpec:
    """The model with these feed-forward parts."""
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6), adds_one=True)
    has_bias = config.flag("attention_bias")
    attention = config.attention(
        rope=config.rope(config.head_dim, is_partial=True),
        qk_norm=QkNorm(norm=norm),
        has_gate=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    recurrence = delta_net(config)
    layers = [
        Layer(
            attention=None if kind == _LINEAR else attention,
            recurrence=recurrence if kind == _LINEAR else None,
            feed_forward=part,
            before_attention=norm,
            before_feed_forward=norm,
        )
        for kind, part in zip(_kinds(config), feed_forwards, strict=True)
    ]
    last = replace(layers[-1], attention=attention, recurrence=None)
    return config.model(layers, norm, names, predictor=Predictor.apart(last, norm))


def _kinds(config: Config) -> Sequence[str]:
    """The kind of each layer."""
    interval = config.size("full_attention_interval", 4)
    default = [
        _LINEAR if (index + 1) % interval else "full_attention"
        for index in range(config.num_layers)
    ]
    return config.kinds(default, [_LINEAR])


def delta_net(config: Config) -> DeltaNet:
    """The linear attention of a layer."""
    num_heads = config.size("linear_num_value_heads")
    num_key_heads = config.size("linear_num_key_heads")
    if num_heads % num_key_heads:
        raise StartupError(
            f"the model's config.json says that {num_heads} linear heads share {num_key_heads} key "
            "heads, which is not a divisor"
        )
    return DeltaNet(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        num_taps=config.size("linear_conv_kernel_dim"),
        norm=Norm(eps=config.number("rms_norm_eps", 1e-6)),
    )
