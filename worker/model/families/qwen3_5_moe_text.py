"""The language model of Qwen 3.5 and 3.6 with experts in all layers."""

from worker.model.config import Config
from worker.model.families import qwen3_next
from worker.model.spec import LayerNames, ModelSpec, Names

_DEFAULTS = qwen3_next.DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8}
NAMES = Names(
    layers=LayerNames(
        expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"
    ),
    # Some checkpoints without a tower keep the names that the model has beside a tower.
    prefixes=("model.", "model.language_model."),
    # The predictor has names of its own.
    is_within=True,
)


def read(config: Config, names: Names = NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    return qwen3_next.hybrid(config, [qwen3_next.mixture(config)] * config.num_layers, names)
