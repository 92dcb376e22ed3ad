"""In batch-invariant mode, the bits of a sequence with recurrent states do not depend on the batch
or on where its prompt is cut; in the interpreter if there is no GPU."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernels.providers import load_ops
from tests.kernels.interpreter import quick_interpreter
from tests.support.models.tiny import native_spec, write_tiny_model
from tests.worker.model.decoders.test_native_families import stepwise_logits
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Target
from worker.model.weights.layers import WeightReader, read_weights

__all__ = ["quick_interpreter"]

RECURRENCES = {
    "ShortConv": "lfm2",
    "DeltaNet": "qwen3_5_text",
    "KimiDelta": "kimi_linear",
    "Mamba": "jamba",
    "Mamba2": "falcon_h1",
}
"""A family with each recurrence."""
ALONE, TOGETHER = [(4, 0), (0, 6)], [(1, 6), (3, 0)]
"""The tokens of both prompts in each step. Together, the first prompt is in two chunks."""
NUM_ALIKE = 64
"""A multiple of the numbers that a processor's vectors hold."""


class AlikeElements(TorchFunctionMode):
    """Computes all elements of a tensor with the same instructions, as a GPU does. On a CPU, torch
    rounds the exponentials of a tensor's last elements, which fill no vector, in another way."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (torch.exp, torch.sigmoid, functional.silu, functional.softplus):
            return func(*args, **(kwargs or {}))
        (values,) = args
        padded: Tensor = functional.pad(values.flatten(), (0, -values.numel() % NUM_ALIKE))
        return func(padded)[: values.numel()].view(values.shape)


def invariant_decoder(directory: Path) -> StackDecoder:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, target = native_spec(read_json_config(directory)), Target(torch.float32, device, "triton")
    weights = read_weights(WeightReader(Checkpoint(directory), spec, Dense(), target))
    return StackDecoder(spec, weights, load_ops("triton", is_batch_invariant=True), max_seq_len=64)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_the_bits_of_a_recurrent_model_do_not_depend_on_the_batch(
    tmp_path: Path, recurrence: str
) -> None:
    write_tiny_model(tmp_path, RECURRENCES[recurrence])
    decoder = invariant_decoder(tmp_path)

    with AlikeElements():
        alone, together = (stepwise_logits(decoder, steps) for steps in (ALONE, TOGETHER))

    assert [torch.equal(*both) for both in zip(together, alone, strict=True)] == [True, True]
