"""Mixtral, a Mistral with experts."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.spec import Experts, Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMES = Names(
    layers=LayerNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    router = Router(top_k=config.size("num_experts_per_tok"), scores="softmax", is_normalized=True)
    layer = Layer(
        attention=config.attention(window=config.window()),
        feed_forward=Experts(
            count=config.size("num_local_experts"), expert=config.mlp(), router=router
        ),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, NAMES)
