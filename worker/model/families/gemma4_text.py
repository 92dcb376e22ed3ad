"""Gemma 4 without inputs of its own for each layer: heads of layers with and without a window
differ."""

from worker.model.config import Config, NotNative
from worker.model.families.gemma2 import NAMES
from worker.model.spec import Attention, Layer, ModelSpec, Names, Norm, QkNorm

_DEFAULTS = {
    "vocab_size": 262_144,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}


def read(config: Config, names: Names = NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block"):
        if config.get(key):
            raise NotNative(f"{key} is {config.get(key)}")
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    kinds = list(
        config.kinds(
            [
                "sliding_attention" if (layer + 1) % 6 else "full_attention"
                for layer in range(config.num_layers)
            ]
        )
    )
    kinds[-1] = "full_attention"
    layers = [
        Layer(
            attention=_attention(config, index, kind, norm),
            feed_forward=config.mlp(activation=config.activation("hidden_activation")),
            before_attention=norm,
            after_attention=norm,
            before_feed_forward=norm,
            after_feed_forward=norm,
            has_scalar=True,
        )
        for index, kind in enumerate(kinds)
    ]
    return config.model(
        layers,
        norm,
        names,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def _attention(config: Config, index: int, kind: str, norm: Norm) -> Attention:
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
        values_are_keys=are_equal,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
