"""DeepSeek V2: attention over latent vectors, and experts chosen by their probabilities."""

from dataclasses import replace

from kernels.router import Router
from worker.model.config import Config, NotNative
from worker.model.families.deepseek_v3 import latent_attention
from worker.model.families.glm4_moe import NAMES
from worker.model.spec import Experts, ModelSpec, Norm

_DEFAULTS = {
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
}
_NAMES = replace(NAMES, has_further_layers=False)
_METHODS = ("greedy", "group_limited_greedy")


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    config.require("moe_layer_freq", 1)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    rope = config.rope(config.size("qk_rope_head_dim"), is_interleaved=True)
    attention = latent_attention(config, rope)
    return config.mixture(attention, _experts(config), norm, _NAMES)


def _experts(config: Config) -> Experts:
    method = config.get("topk_method")
    if method not in _METHODS:
        raise NotNative(f"topk_method is {method}")
    if config.flag("norm_topk_prob"):
        raise NotNative("norm_topk_prob is set")
    is_grouped, size = method == "group_limited_greedy", config.size("moe_intermediate_size")
    return Experts(
        # transformers writes the first name, the published checkpoints have the second one.
        count=config.size("num_experts", config.size("n_routed_experts")),
        expert=config.mlp(size),
        router=Router(
            top_k=config.size("num_experts_per_tok"),
            scores="softmax",
            scale=config.number("routed_scaling_factor", 1.0),
            num_groups=config.size("n_group") if is_grouped else 1,
            num_chosen_groups=config.size("topk_group") if is_grouped else 1,
        ),
        shared=config.mlp(size * config.size("n_shared_experts")),
    )
