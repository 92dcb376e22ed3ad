"""Qwen 1.5 and 2 with experts, and a shared expert with a gate."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.families import qwen2
from worker.model.spec import Experts, Layer, Mlp, ModelSpec, Norm

_DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    mixture = experts(config, shared=config.mlp("shared_expert_intermediate_size"))
    layers = [
        Layer(
            attention=config.attention(window=window, has_qkv_bias=config.flag("qkv_bias")),
            feed_forward=mixture if is_mixture(config, index) else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for index, window in enumerate(qwen2.windows(config))
    ]
    return config.model(layers, norm)


def experts(
    config: Config, shared: Mlp | None = None, *, size: str = "moe_intermediate_size"
) -> Experts:
    """The experts of all layers that have any."""
    return Experts(
        # transformers writes the first name, the published checkpoints have the second name.
        count=config.size("num_local_experts", config.size("num_experts")),
        expert=config.mlp(size),
        router=Router(
            top_k=config.size("num_experts_per_tok"),
            scores="softmax",
            is_normalized=config.flag("norm_topk_prob"),
        ),
        shared=shared,
        has_shared_gate=shared is not None,
    )


def is_mixture(config: Config, index: int) -> bool:
    """Whether a layer has experts."""
    is_dense = index in config.get("mlp_only_layers", [])
    return not is_dense and (index + 1) % config.get("decoder_sparse_step", 1) == 0
