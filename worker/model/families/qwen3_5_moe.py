"""The language model of a Qwen 3.5 or 3.6 checkpoint with experts that also has a tower for
images."""

from worker.model.config import Config
from worker.model.families import qwen3_5_moe_text
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    is_tied = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    names = qwen3_5_moe_text.NAMES.within()
    return qwen3_5_moe_text.read(config.within("text_config", is_tied), names)
