"""The language model of a Gemma 3 checkpoint that also has a tower for images."""

from dataclasses import replace

from worker.model.config import Config
from worker.model.families import gemma3_text
from worker.model.families.gemma2 import NAMES
from worker.model.spec import ModelSpec

_NAMES = replace(
    NAMES,
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head", "lm_head"),
    is_within=True,
)


def read(config: Config) -> ModelSpec:
    return gemma3_text.read(config.within("text_config"), _NAMES)
