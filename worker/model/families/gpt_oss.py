"""gpt-oss: attention sinks, a window in every other layer, and experts with biases."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.spec import Experts, Layer, LayerNames, Mlp, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
_NAMES = Names(
    layers=LayerNames(
        router="mlp.router",
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
        are_experts_transposed=True,
        are_gates_interleaved=True,
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias")
    config.require("swiglu_limit", 7.0)
    config.require("swiglu_alpha", 1.702)
    experts = Experts(
        count=config.size("num_local_experts"),
        expert=Mlp(
            size=config.size("intermediate_size"), activation="clamped_swiglu", has_bias=True
        ),
        router=Router(
            top_k=config.size("num_experts_per_tok"), scores="softmax of chosen", has_bias=True
        ),
    )
    kinds = ["full_attention" if k % 2 else "sliding_attention" for k in range(config.num_layers)]
    layers = [
        Layer(
            attention=config.attention(
                rope=config.rope(config.head_dim, theta=150_000.0),
                window=window,
                has_sinks=True,
                has_qkv_bias=has_bias,
                has_output_bias=has_bias,
            ),
            feed_forward=experts,
            before_attention=norm,
            before_feed_forward=norm,
        )
        for window in config.windows(kinds)
    ]
    return config.model(layers, norm, _NAMES)
