"""Qwen 3."""

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(_: GgufModel) -> None:
    """transformers makes the configuration."""


ARCHITECTURE = Architecture(name="qwen3", read=read)
