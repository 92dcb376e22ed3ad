"""The language model of a Llama 4 checkpoint that also has a tower for images."""

from worker.model.config import Config
from worker.model.families import llama4_text
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return llama4_text.read(config.within("text_config"), llama4_text.NAMES.within())
