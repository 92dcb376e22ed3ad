"""The language model of a Gemma 4 12B checkpoint, which reads images and sound without towers."""

from worker.model.config import Config
from worker.model.families import gemma4_text, gemma4_unified_text
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return gemma4_unified_text.read(config.within("text_config"), gemma4_text.NAMES.within())
