"""MiMo, which has the layers of Qwen 2, and beside them layers that predict further tokens."""

from dataclasses import replace

from worker.model.config import Config
from worker.model.families import qwen2
from worker.model.spec import ModelSpec, Names, Predictor


def read(config: Config) -> ModelSpec:
    spec = qwen2.read(config)
    return replace(
        spec,
        names=Names(further_parts=("mtp_layers.",)),
        predictor=Predictor.beside(spec.layers[-1], spec.final_norm),
    )
