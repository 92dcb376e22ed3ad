"""Hunyuan without experts."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """The file's base of rotary frequencies is stretched already."""
    return model.decoder() | {"model_type": "hunyuan_v1_dense"}


ARCHITECTURE = Architecture(name="hunyuan-dense", read=read)
