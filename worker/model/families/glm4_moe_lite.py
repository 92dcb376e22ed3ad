"""GLM 4.7 Flash: attention over latent vectors, and the experts of GLM 4.5."""

from shared.errors import StartupError
from worker.model.config import Config
from worker.model.families.deepseek_v3 import latent_attention
from worker.model.families.glm4_moe import NAMES, experts_of
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "num_attention_heads": 20,
    "max_position_embeddings": 202_752,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_interleave": True,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    rope = config.rope(
        config.size("qk_rope_head_dim"), is_interleaved=config.flag("rope_interleave")
    )
    attention, experts = latent_attention(config, rope), experts_of(config)
    layers = [
        Layer(
            attention=attention,
            feed_forward=experts if is_mixture else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for is_mixture in mixtures(config)
    ]
    return config.model(layers, norm, NAMES)


def mixtures(config: Config) -> list[bool]:
    """Whether each layer has experts."""
    num_layers, num_dense = config.num_layers, config.get("first_k_dense_replace", 0)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return [index >= num_dense for index in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise StartupError(
            f"the model's config.json says mlp_layer_types {kinds}, for {num_layers} layers"
        )
    return [kind == "sparse" for kind in kinds]
