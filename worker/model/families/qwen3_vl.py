"""The language model of a Qwen3-VL checkpoint, which is a Qwen 3. The three positions of a token
are the same for text, so that they are one position."""

from worker.model.config import Config
from worker.model.families import qwen3
from worker.model.spec import ModelSpec, Names

_DEFAULTS = qwen3.DEFAULTS | {"max_position_embeddings": 128_000, "rope_theta": 5e5}


def read(config: Config) -> ModelSpec:
    is_tied = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    return qwen3.read(config.within("text_config"), Names().within(), _DEFAULTS | is_tied)
