"""The language model of a Qwen3-VL checkpoint with experts, which is a Qwen 3 with experts."""

from worker.model.config import Config
from worker.model.families import qwen3_moe
from worker.model.spec import LayerNames, ModelSpec, Names

_NAMES = Names(
    layers=LayerNames(
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
        are_experts_transposed=True,
    )
)
_DEFAULTS = qwen3_moe.DEFAULTS | {
    "max_position_embeddings": 128_000,
    "rope_theta": 5e5,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}


def read(config: Config) -> ModelSpec:
    is_tied = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    return qwen3_moe.read(config.within("text_config"), _NAMES.within(), _DEFAULTS | is_tied)
