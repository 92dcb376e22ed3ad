"""Granite with experts."""

from kernels.router import Router
from worker.model.config import Config
from worker.model.families import granite
from worker.model.spec import Experts, LayerNames, ModelSpec, Names

_DEFAULTS = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
_NAMES = Names(
    layers=LayerNames(
        router="block_sparse_moe.router.layer",
        expert_gate_up=("block_sparse_moe.input_linear.weight",),
        expert_down="block_sparse_moe.output_linear.weight",
    )
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    experts = Experts(
        count=config.size("num_local_experts"),
        expert=config.mlp(),
        router=Router(top_k=config.size("num_experts_per_tok"), scores="softmax of chosen"),
    )
    return granite.model(config, experts, _NAMES)
