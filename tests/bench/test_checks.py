"""A system of ours with wrong output is not measured."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.checks import WrongOutput, check_agreement
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model

PROMPT = [(7 * i + i // 3) % VOCAB_SIZE for i in range(100)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights bfloat16 represents exactly, like SmolLM2's weights."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(
        directory, "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4
    )
    path = directory / "model.safetensors"
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def test_a_format_near_float32_passes_and_says_how_near(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_agreement(tiny, PROMPT, ["bfloat16"])

    said = " ".join(capsys.readouterr().err.split())
    assert "bfloat16 against float32 on 100 tokens: KL" in said
    assert "(at most 1e-03)" in said


def test_weights_that_predict_something_else_are_refused(tiny: Path) -> None:
    with pytest.raises(WrongOutput, match="q4_0 against float32 on 100 tokens"):
        check_agreement(tiny, PROMPT, ["q4_0"])
