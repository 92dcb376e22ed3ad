"""OLMoE, with experts, and norms of all heads of queries and keys together."""

from worker.model.config import Config, NotNative
from worker.model.families import olmo2, qwen2_moe
from worker.model.spec import Layer, ModelSpec, Norm

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    if config.get("clip_qkv") is not None:
        raise NotNative("clip_qkv is set")
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    layer = Layer(
        attention=olmo2.attention(config, norm),
        feed_forward=qwen2_moe.experts(config, size="intermediate_size"),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm)
