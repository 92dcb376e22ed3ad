"""The language model of a Qwen 3.5 or 3.6 checkpoint that also has a tower for images."""

from worker.model.config import Config
from worker.model.families import qwen3_5_text
from worker.model.spec import ModelSpec, Names


def read(config: Config) -> ModelSpec:
    is_tied = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    return qwen3_5_text.read(config.within("text_config", is_tied), Names().within())
