"""The language model of Qwen 3 VL with experts."""

from typing import Any

from worker.checkpoints.architectures import qwen3moe
from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return qwen3moe.read(model)


ARCHITECTURE = Architecture(name="qwen3vlmoe", read=read)
