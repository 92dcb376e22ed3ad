"""Families on Triton's kernels compute what they compute on the reference; in the interpreter if
there is no GPU."""

from pathlib import Path

import pytest
import torch

from kernels.providers import Provider, load_ops
from tests.kernels.interpreter import quick_interpreter
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import native_spec, write_tiny_model
from tests.worker.model.decoders.test_native_families import stepwise_logits
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Target
from worker.model.weights.layers import WeightReader, read_weights

__all__ = ["quick_interpreter"]

STEPS = [(5, 0), (1, 3)]
FAMILIES = (
    "qwen3_moe",
    "gpt_oss",
    "qwen3_5_text",
    "lfm2",
    "falcon_h1",
    "jamba",
    "deepseek_v3",
    "llama4_text",
    "bloom",
    "kimi_linear",
)
MAX_RELATIVE_ERROR = 1e-5


def loaded(directory: Path, provider: Provider) -> StackDecoder:
    spec = native_spec(read_json_config(directory))
    target = Target(torch.float32, torch.device("cpu"), provider)
    weights = read_weights(WeightReader(Checkpoint(directory), spec, Dense(), target))
    return StackDecoder(spec, weights, load_ops(provider), max_seq_len=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_logits_of_the_reference(tmp_path: Path, family: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the tensors are on the CPU, where only the interpreter runs")
    write_tiny_model(tmp_path, family)
    decoder = loaded(tmp_path, "triton")
    assert decoder.has_own_kernels

    logits = stepwise_logits(decoder, STEPS)

    for ours, right in zip(
        logits, stepwise_logits(loaded(tmp_path, "reference"), STEPS), strict=True
    ):
        assert_close(ours, right, MAX_RELATIVE_ERROR)
