"""LFM2, most of whose layers have a short convolution in place of attention."""

from collections.abc import Sequence
from typing import Any

from worker.model.config import Config
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm, QkNorm, ShortConv

DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
LAYER_NAMES = LayerNames(
    attention_output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_NAMES = Names(layers=LAYER_NAMES, final_norm="embedding_norm")
_THETA = 1_000_000.0
_CONVOLUTION = "conv"


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    norm = Norm(eps=config.number("norm_eps", 1e-5))
    feed_forward = config.mlp(_adjusted_size(config), activation="silu")
    layers = [
        Layer(
            feed_forward=feed_forward,
            before_attention=norm,
            before_feed_forward=norm,
            **mixer(config, kind, norm),
        )
        for kind in kinds(config)
    ]
    return config.model(layers, norm, _NAMES, has_tied_embeddings=has_tied_embeddings(config))


def kinds(config: Config) -> Sequence[str]:
    """The kind of each layer."""
    indices = config.get("full_attn_idxs", range(config.num_layers))
    default = [
        "full_attention" if index in indices else _CONVOLUTION for index in range(config.num_layers)
    ]
    return config.kinds(default, [_CONVOLUTION])


def mixer(config: Config, kind: str, norm: Norm) -> dict[str, Any]:
    """The attention or the recurrence of a layer, as a field of `Layer`."""
    if kind == _CONVOLUTION:
        return {
            "recurrence": ShortConv(
                size=config.size("hidden_size"),
                num_taps=config.size("conv_L_cache", 3),
                has_bias=config.flag("conv_bias"),
            )
        }
    rope = config.rope(config.head_dim, theta=_THETA)
    return {"attention": config.attention(rope=rope, qk_norm=QkNorm(norm=norm))}


def has_tied_embeddings(config: Config) -> bool:
    return bool(config.get("tie_embedding", config.get("tie_word_embeddings", True)))


def _adjusted_size(config: Config) -> int:
    """The size of feed-forward parts: two thirds of the stated size, rounded up."""
    size = config.size("block_ff_dim", config.size("intermediate_size"))
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    factor = config.get("block_ffn_dim_multiplier")
    if factor is None:
        return size
    multiple = config.size("block_multiple_of")
    return -(-int(factor * size) // multiple) * multiple
