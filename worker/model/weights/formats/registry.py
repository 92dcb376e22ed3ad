"""The registry of formats."""

from collections.abc import Mapping
from typing import Any

from kernels.quantized import QuantFormat
from shared.errors import StartupError
from worker.model.weights.formats.awq import Awq
from worker.model.weights.formats.blocks import Quantized
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Format
from worker.model.weights.sources import TensorSource

FORMATS: tuple[type[Format], ...] = (Awq, Dense)
"""Formats in the order in which they are tried."""


def format_of(
    config: Mapping[str, Any],
    source: TensorSource,
    quant_format: QuantFormat | None = None,
    *,
    head_dim: int = 1,
) -> Format:
    """The format of a checkpoint, or the one that its floats are quantized to.

    Raises `StartupError` if matrices that are already packed would have to be quantized again.
    """
    stored = next(found for kind in FORMATS if (found := kind.detect(config, source)))
    if quant_format is None:
        return stored
    if stored.name != Dense.name:
        raise StartupError(
            f"weight_format {quant_format}: the checkpoint is packed as {stored.name}"
        )
    return Quantized(quant_format, source.directory, head_dim)
