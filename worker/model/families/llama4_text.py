"""Llama 4: attention in chunks, with every fourth layer without positions, and experts."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.spec import (
    Experts,
    Layer,
    LayerNames,
    ModelSpec,
    Names,
    Norm,
    QkNorm,
    Temperature,
)

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "intermediate_size_mlp": 16_384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
NAMES = Names(
    layers=LayerNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert_gate_up=("feed_forward.experts.gate_up_proj",),
        expert_down="feed_forward.experts.down_proj",
        are_experts_transposed=True,
        shared_gate_up=(
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
        ),
        shared_down="feed_forward.shared_expert.down_proj",
    )
)


def read(config: Config, names: Names = NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias")
    rope = config.rope(config.head_dim, theta=500_000.0, is_interleaved=True)
    l2_norm = QkNorm(norm=Norm(eps=norm.eps, has_weight=False), is_after_rope=True)
    temperature = Temperature(
        scale=config.number("attn_scale"), length=config.number("floor_scale"), shift=1.0
    )
    layers = []
    every, step = config.size("no_rope_layer_interval"), config.size("interleave_moe_layer_step")
    num_layers = config.num_layers
    has_rope = config.get("no_rope_layers") or [(k + 1) % every for k in range(num_layers)]
    mixtures = config.get("moe_layers", range(step - 1, num_layers, step))
    kinds = config.kinds(["chunked_attention" if one else "full_attention" for one in has_rope])
    for index, kind in enumerate(kinds):
        is_rotated = bool(has_rope[index])
        is_tuned = config.flag("attn_temperature_tuning") and not is_rotated
        layers.append(
            Layer(
                attention=config.attention(
                    rope=rope if is_rotated else None,
                    chunk=config.get("attention_chunk_size") if "chunk" in kind else None,
                    qk_norm=l2_norm if is_rotated and config.flag("use_qk_norm") else None,
                    temperature=temperature if is_tuned else None,
                    has_qkv_bias=has_bias,
                    has_output_bias=has_bias,
                ),
                feed_forward=_experts(config)
                if index in mixtures
                else config.mlp("intermediate_size_mlp"),
                before_attention=norm,
                before_feed_forward=norm,
            )
        )
    return config.model(layers, norm, names)


def _experts(config: Config) -> Experts:
    expert = config.mlp()
    return Experts(
        count=config.size("num_local_experts"),
        expert=expert,
        router=Router(
            top_k=config.size("num_experts_per_tok"), scores="sigmoid", weighs_inputs=True
        ),
        shared=expert,
    )
