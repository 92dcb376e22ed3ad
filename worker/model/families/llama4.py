"""The language model of a Llama 4 checkpoint that also has a tower for images."""

from dataclasses import replace

from worker.model.config import Config
from worker.model.families import llama4_text
from worker.model.spec import ModelSpec

_NAMES = replace(
    llama4_text.NAMES,
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head", "lm_head"),
    is_within=True,
)


def read(config: Config) -> ModelSpec:
    return llama4_text.read(config.within("text_config"), _NAMES)
