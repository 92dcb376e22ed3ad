"""Kimi K2, which has the layers of DeepSeek V3."""

from worker.model.config import Config
from worker.model.families import deepseek_v3
from worker.model.spec import ModelSpec


def read(config: Config) -> ModelSpec:
    return deepseek_v3.read(config)
