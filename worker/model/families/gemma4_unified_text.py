"""The language model of Gemma 4 12B, which has neither inputs of layers nor experts."""

from worker.model.config import Config
from worker.model.families import gemma4_text
from worker.model.spec import ModelSpec, Names

_DEFAULTS = gemma4_text.DEFAULTS | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def read(config: Config, names: Names = gemma4_text.NAMES) -> ModelSpec:
    return gemma4_text.read(config, names, _DEFAULTS)
