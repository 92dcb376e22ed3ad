"""MiniMax M2, with experts chosen by sigmoids, and part of each head rotated."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.spec import Experts, Layer, LayerNames, ModelSpec, Names, Norm, QkNorm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_NAMES = Names(
    layers=LayerNames(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    has_further_layers=True,
)


def read(config: Config) -> ModelSpec:
    rotated = config.get("rotary_dim")
    defaults = {**_DEFAULTS}
    if rotated is not None:
        defaults["partial_rotary_factor"] = rotated / config.with_defaults(_DEFAULTS).head_dim
    config = config.with_defaults(defaults)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    layer = Layer(
        attention=config.attention(
            rope=config.rope(config.head_dim, theta=5e6, is_partial=True),
            qk_norm=QkNorm(norm=norm, over="all heads"),
        ),
        feed_forward=Experts(
            count=config.size("num_local_experts"),
            expert=config.mlp(),
            router=Router(
                top_k=config.size("num_experts_per_tok"),
                scores="sigmoid",
                is_normalized=True,
                has_correction=True,
            ),
        ),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)
