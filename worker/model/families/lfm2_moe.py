"""LFM2 with experts, behind a few dense layers."""

from dataclasses import replace

from kernels.router import Router
from worker.model.config import Config
from worker.model.families import lfm2
from worker.model.spec import Experts, Layer, ModelSpec, Names, Norm

_DEFAULTS = {
    **lfm2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
}
_NAMES = Names(
    layers=replace(
        lfm2.LAYER_NAMES,
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
    ),
    final_norm="embedding_norm",
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("norm_eps", 1e-5))
    num_dense = config.get("num_dense_layers", 0)
    dense = config.mlp(activation="silu")
    experts = Experts(
        count=config.size("num_experts"),
        expert=config.mlp("moe_intermediate_size", activation="silu"),
        router=Router(
            top_k=config.size("num_experts_per_tok"),
            scores="sigmoid",
            is_normalized=config.flag("norm_topk_prob"),
            scale=config.number("routed_scaling_factor", 1.0),
            has_correction=config.flag("use_expert_bias"),
        ),
    )
    layers = [
        Layer(
            feed_forward=dense if index < num_dense else experts,
            before_attention=norm,
            before_feed_forward=norm,
            **lfm2.mixer(config, kind, norm),
        )
        for index, kind in enumerate(lfm2.kinds(config))
    ]
    return config.model(layers, norm, _NAMES, has_tied_embeddings=lfm2.has_tied_embeddings(config))
