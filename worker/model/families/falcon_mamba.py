"""Falcon Mamba, whose steps and vectors that write and read are normalized without weights."""

from worker.model.config import Config
from worker.model.families import mamba
from worker.model.spec import ModelSpec, Norm


def read(config: Config) -> ModelSpec:
    norm = Norm(eps=config.number("mixer_rms_eps", 1e-6), has_weight=False)
    return mamba.of_state_spaces(config, norm)
