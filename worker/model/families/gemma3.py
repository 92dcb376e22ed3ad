"""The language model of a Gemma 3 checkpoint that also has a tower for images."""

from worker.model.config import Config
from worker.model.families import gemma2, gemma3_text
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return gemma3_text.read(config.within("text_config"), gemma2.NAMES.within())
