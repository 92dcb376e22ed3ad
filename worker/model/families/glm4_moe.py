"""GLM 4.5 to 4.7, with experts in groups and a shared expert."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.spec import Experts, LayerNames, ModelSpec, Names, Norm, QkNorm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
NAMES = Names(
    layers=LayerNames(
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    ),
    has_further_layers=True,
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    attention = config.attention(
        rope=config.rope(config.head_dim, is_partial=True),
        qk_norm=QkNorm(norm=norm) if config.flag("use_qk_norm") else None,
        has_qkv_bias=config.flag("attention_bias"),
    )
    return config.mixture(attention, experts_of(config), norm, NAMES, num_dense=1)


def experts_of(config: Config) -> Experts:
    size = config.size("moe_intermediate_size")
    return Experts(
        # transformers writes the first name, the published checkpoints have the second name.
        count=config.size("num_local_experts", config.size("n_routed_experts")),
        expert=config.mlp("moe_intermediate_size"),
        router=Router(
            top_k=config.size("num_experts_per_tok"),
            scores="sigmoid",
            is_normalized=config.flag("norm_topk_prob"),
            scale=config.number("routed_scaling_factor", 1.0),
            num_groups=config.size("n_group", 1),
            num_chosen_groups=config.size("topk_group", 1),
            has_correction=True,
        ),
        shared=config.mlp(size=size * config.size("n_shared_experts")),
    )
