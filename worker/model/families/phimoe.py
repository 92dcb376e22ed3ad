"""Phi 3.5 with experts, which a sparse mixer chooses, and with LongRoPE."""

from kernels.router import Router
from worker.model.config import Config, NotNative
from worker.model.families.mixtral import NAMES
from worker.model.spec import Experts, Layer, ModelSpec, Norm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "num_local_experts": 16,
    "router_jitter_noise": 0.01,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    config.require("num_experts_per_tok", 2)
    rope = config.rope(config.head_dim, theta=1_000_000.0)
    if rope.parameters["rope_type"] not in ("default", "longrope"):
        raise NotNative(f"its rope_type is {rope.parameters['rope_type']}")
    has_head_bias = config.flag("lm_head_bias")
    if has_head_bias and config.flag("tie_word_embeddings"):
        raise NotNative("the embedding is also the output projection, which has a bias")
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5), kind="layer", has_bias=True)
    has_bias = config.flag("attention_bias")
    layer = Layer(
        attention=config.attention(
            rope=rope,
            window=config.window(),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        feed_forward=Experts(
            count=config.size("num_local_experts"),
            expert=config.mlp(),
            router=Router(
                top_k=2, scores="sparse mixer", spread=2 * config.number("router_jitter_noise")
            ),
        ),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, NAMES, has_head_bias=has_head_bias)
