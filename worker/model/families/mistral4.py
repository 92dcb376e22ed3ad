"""Mistral Small 4: attention over latent vectors whose queries grow with their positions, and
experts."""

from dataclasses import replace

from worker.model.config import Config, NotNative
from worker.model.families import glm4_moe, ministral3
from worker.model.families.deepseek_v3 import latent_attention
from worker.model.spec import ModelSpec, Names, Norm

NAMES = replace(
    glm4_moe.NAMES,
    layers=replace(
        glm4_moe.NAMES.layers,
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
    ),
)
_DEFAULTS = {
    "num_attention_heads": 32,
    "max_position_embeddings": 1_048_576,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(config: Config, names: Names = NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    rope = config.rope(
        config.size("qk_rope_head_dim"),
        is_whole=True,
        is_interleaved=config.flag("rope_interleave"),
    )
    attention = replace(latent_attention(config, rope), temperature=ministral3.temperature_of(rope))
    experts = glm4_moe.experts_of(config)
    if experts.router.num_groups > 1:
        raise NotNative(f"n_group is {experts.router.num_groups}")
    router = replace(experts.router, scores="softmax", has_correction=False)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    return config.mixture(attention, replace(experts, router=router), norm, names)
