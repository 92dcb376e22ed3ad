"""The language model of a Gemma 4 checkpoint that also has towers for images and sound."""

from worker.model.config import Config
from worker.model.families import gemma4_text
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return gemma4_text.read(config.within("text_config"), gemma4_text.NAMES.within())
