"""The language model of Qwen 3.5 and 3.6: Qwen3-Next's layers, without experts."""

from worker.model.config import Config
from worker.model.families import qwen3_next
from worker.model.spec import ModelSpec, Names

_DEFAULTS = qwen3_next.DEFAULTS | {"num_key_value_heads": 4}
# Some checkpoints without a tower keep the names that the model has beside a tower. The predictor
# has names of its own.
_NAMES = Names(prefixes=("model.", "model.language_model."), is_within=True)


def read(config: Config, names: Names = _NAMES) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    return qwen3_next.hybrid(config, [config.mlp()] * config.num_layers, names)
