"""The engine's benchmark in a few seconds, and what it computes about limits."""

import json
from pathlib import Path

import pytest
import torch

from bench import ceilings
from bench.ceilings import element_bytes, work_of
from bench.engine import main
from bench.gpu.scale import SCALES

TINY = SCALES["tiny"].model


@pytest.mark.timeout(300)
def test_the_engine_is_measured_beside_its_limits(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(model="smollm2", formats=["q8_0"], threads=1, quick=True, out=tmp_path)

    written = json.loads((tmp_path / "engine.json").read_text())
    assert min(written["peak"].values()) > 0
    assert [product["num_tokens"] for product in written["torch_linears"]] == [1, 16]
    assert all(product["bfloat16_ms"] > 0 for product in written["torch_linears"])
    assert "of peak" in capsys.readouterr().out


def test_a_step_reads_weights_once_and_multiplies_them_for_each_token() -> None:
    one = work_of(TINY, "bfloat16", torch.bfloat16, num_seqs=1, num_new_tokens=1, context=0)
    three = work_of(TINY, "bfloat16", torch.bfloat16, num_seqs=3, num_new_tokens=1, context=10)

    num_weights = TINY.num_layers * TINY.hidden_size * TINY.intermediate_size
    assert one["down"].num_bytes == three["down"].num_bytes == 2 * num_weights
    assert one["down"].flops == 2 * num_weights
    assert three["down"].flops == 6 * num_weights
    assert one["logits"].flops == 2 * TINY.vocab_size * TINY.hidden_size


def test_attention_reads_each_key_and_value_once() -> None:
    prompt = work_of(TINY, "float32", torch.float32, num_seqs=1, num_new_tokens=4, context=6)
    # Tokens attend to 7, 8, 9 and 10 tokens, in two layers of four heads of 32 elements.
    assert prompt["attention"].flops == 4 * (7 + 8 + 9 + 10) * 2 * 4 * 32
    assert prompt["attention"].num_bytes == 4 * 2 * 10 * 2 * 2 * 32


@pytest.mark.parametrize(
    ("weights", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("q8_0", 34 / 32), ("q4_1", 0.625)]
)
def test_packed_weights_count_their_scales(weights: str, num_bytes: float) -> None:
    assert element_bytes(weights) == num_bytes


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="compiler"):
        ceilings.peak_rates(1, 0.01)
