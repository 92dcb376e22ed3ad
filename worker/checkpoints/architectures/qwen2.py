"""Qwen 2 and 2.5."""

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(_: GgufModel) -> None:
    """transformers makes the configuration."""


ARCHITECTURE = Architecture(name="qwen2", read=read)
