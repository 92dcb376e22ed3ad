"""The registry of formats."""

from collections.abc import Mapping
from typing import Any

from kernels.quantized import QuantFormat
from shared.errors import StartupError
from worker.model.weights.formats.awq import Awq
from worker.model.weights.formats.bitsandbytes import BitsAndBytes
from worker.model.weights.formats.blocks import Gguf, Quantized
from worker.model.weights.formats.coded import method_of
from worker.model.weights.formats.compressed import CompressedTensors
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.fp8 import Fp8
from worker.model.weights.formats.gptq import Gptq
from worker.model.weights.formats.interface import Format
from worker.model.weights.formats.mixed import Mixed
from worker.model.weights.formats.mxfp4 import Mxfp4
from worker.model.weights.formats.nvfp4 import Nvfp4
from worker.model.weights.sources import TensorSource

FORMATS: tuple[type[Format], ...] = (
    Gguf,
    Awq,
    Gptq,
    Mixed,
    Mxfp4,
    Nvfp4,
    CompressedTensors,
    Fp8,
    BitsAndBytes,
)
"""The formats that are recognized; all other checkpoints are stored as floats."""


def format_of(
    config: Mapping[str, Any], source: TensorSource, quant_format: QuantFormat | None = None
) -> Format:
    """The format of a checkpoint, or the format that its floats are quantized to.

    Raises `StartupError` for a quantization that is not supported, and if matrices that are already
    packed would have to be quantized again.
    """
    found = next((found for kind in FORMATS if (found := kind.detect(config, source))), None)
    method = method_of(config)
    if found is None and method is not None:
        raise StartupError(
            f"the model's weights are quantized with {method}, which is not supported: use the "
            "model in its original precision, or as a GGUF file"
        )
    stored = found or Dense()
    if quant_format is None:
        return stored
    if stored.name not in (Dense.name, Gguf.name):
        raise StartupError(
            f"weight_format {quant_format}: the checkpoint is packed as {stored.name}"
        )
    return Quantized(quant_format)
