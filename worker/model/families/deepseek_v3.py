"""DeepSeek V3 and R1: attention over latent vectors, and experts in groups behind dense layers."""

import math

from worker.model.config import Config, NotNative
from worker.model.families.glm4_moe import NAMES, experts_of
from worker.model.spec import Attention, Latent, ModelSpec, Names, Norm, Rope

_DEFAULTS = {
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_EPS = 1e-6
"""Of the norms of latent vectors, whatever the configuration says about the other norms."""


def read(config: Config, names: Names = NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    config.require("moe_layer_freq", 1)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    rope = config.rope(
        config.size("qk_rope_head_dim"), is_interleaved=config.flag("rope_interleave")
    )
    attention = latent_attention(config, rope)
    return config.mixture(attention, experts_of(config), norm, names)


def latent_attention(config: Config, rope: Rope | None) -> Attention:
    """The attention of all families with latent vectors."""
    rotated_dim = config.size("qk_rope_head_dim")
    rank, has_bias = config.size("kv_lora_rank"), config.flag("attention_bias")
    latent = Latent(
        rank=rank,
        key_dim=config.size("qk_nope_head_dim"),
        value_dim=config.size("v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        norm=Norm(eps=_EPS),
    )
    if has_bias and latent.query_rank is None:
        raise NotNative("latent vectors have a bias, and queries have none")
    return config.attention(
        num_kv_heads=1,
        head_dim=rank + rotated_dim,
        scale=_scale(latent.key_dim + rotated_dim, rope),
        rope=rope,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        latent=latent,
    )


def _scale(key_size: int, rope: Rope | None) -> float:
    """Scores grow with the factor that extends the context, if the configuration says so."""
    scale = 1 / math.sqrt(key_size)
    if rope is None:
        return scale
    factor, growth = rope.parameters.get("factor", 1.0), rope.parameters.get("mscale_all_dim")
    if rope.parameters["rope_type"] == "default" or not growth or factor <= 1:
        return scale
    amplitude: float = 0.1 * growth * math.log(factor) + 1
    return scale * amplitude**2
