"""Gemma 4: heads of layers with and without a window differ. Layers may read the keys and values of
earlier layers, and have inputs of their own, and experts beside the feed-forward part."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.router import Router
from worker.model.config import Config
from worker.model.families import gemma2, gemma3_text
from worker.model.spec import (
    Attention,
    Experts,
    Layer,
    LayerInputs,
    Mlp,
    ModelSpec,
    Names,
    Norm,
    QkNorm,
)

NAMES = Names(
    layers=replace(
        gemma2.NAMES.layers,
        router="router.proj",
        expert_gate_up=("experts.gate_up_proj",),
        expert_down="experts.down_proj",
        shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
        shared_down="mlp.down_proj",
    )
)
DEFAULTS = gemma3_text.DEFAULTS | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "global_head_dim": 512,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6}
        | {"partial_rotary_factor": 0.25},
    },
}


def read(config: Config, names: Names = NAMES, defaults: Mapping[str, Any] = DEFAULTS) -> ModelSpec:
    config = config.with_defaults(defaults)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    activation = config.activation("hidden_activation")
    pattern = [*["sliding_attention"] * 5, "full_attention"] * config.num_layers
    kinds = [*config.kinds(pattern[: config.num_layers])[:-1], "full_attention"]
    layers = []
    for index, source in enumerate(config.kv_sources(kinds)):
        is_wide = source is not None and config.flag("use_double_wide_mlp")
        size = config.size("intermediate_size") * (2 if is_wide else 1)
        layer = Layer(
            attention=_attention(config, index, kinds[index], norm, source),
            feed_forward=_feed_forward(config, config.mlp(size, activation=activation), norm),
            before_attention=norm,
            after_attention=norm,
            before_feed_forward=norm,
            after_feed_forward=norm,
            has_scalar=True,
        )
        layers.append(layer)
    inputs = None
    if config.get("hidden_size_per_layer_input"):
        inputs = LayerInputs(
            size=config.size("hidden_size_per_layer_input"),
            vocab_size=config.size("vocab_size_per_layer_input"),
            activation=activation,
            norm=norm,
        )
    return config.model(
        layers,
        norm,
        names,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        layer_inputs=inputs,
    )


def _feed_forward(config: Config, mlp: Mlp, norm: Norm) -> Mlp | Experts:
    if not config.flag("enable_moe_block"):
        return mlp
    top_k, expert = config.size("top_k_experts"), config.size("moe_intermediate_size")
    return Experts(
        count=config.size("num_experts"),
        expert=replace(mlp, size=expert),
        router=Router(top_k=top_k, scores="softmax", is_normalized=True, has_factors=True),
        shared=mlp,
        own_norm=norm,
    )


def _attention(config: Config, index: int, kind: str, norm: Norm, source: int | None) -> Attention:
    is_full, has_bias = kind == "full_attention", config.flag("attention_bias")
    are_equal = is_full and config.flag("attention_k_eq_v")
    head_dim, num_kv_heads = config.head_dim, config.size("num_key_value_heads")
    if is_full:
        own = config.get("per_layer_config", {}).get(str(index), {})
        head_dim = own.get("head_dim", config.size("global_head_dim"))
        shared = config.get("num_global_key_value_heads", num_kv_heads)
        num_kv_heads = own.get("num_key_value_heads", shared if are_equal else num_kv_heads)
    return config.attention(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=config.rope(head_dim, kind, is_whole=True),
        window=None if is_full else config.window(),
        qk_norm=QkNorm(norm=norm),
        value_norm=Norm(eps=norm.eps, has_weight=False),
        values_are_keys=are_equal and source is None,
        kv_from=source,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
