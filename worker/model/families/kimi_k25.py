"""The language model of a Kimi K2.5 or K2.6 checkpoint that also has a tower for images."""

from worker.model.config import Config
from worker.model.families import deepseek_v3
from worker.model.families.glm4_moe import NAMES
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return deepseek_v3.read(config.within("text_config"), NAMES.within())
