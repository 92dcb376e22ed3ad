"""A whole step of a decoder gives the same bits on every processor."""

from pathlib import Path

import pytest
import torch

from tests.support.models.native import variants
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.decoders.test_native_families import CPU, STEPS, stepwise_logits
from worker.model.decoders import fused
from worker.model.loading import load_decoder


@pytest.mark.parametrize(
    ("dtype", "weight_format"),
    [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "q8_0"), ("bfloat16", "q4_1")],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_variant_computes_the_same_logits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: str,
    weight_format: str,
) -> None:
    odd_size, whole_blocks = 72, 96
    write_tiny_model(
        tmp_path,
        family,
        intermediate_size=odd_size if weight_format == "auto" else whole_blocks,
    )
    computed = {}

    for name, variant in variants().items():
        monkeypatch.setattr(fused, "library", lambda variant=variant: variant)
        decoder = load_decoder(
            tmp_path, dtype=dtype, weight_format=weight_format, device=CPU, num_threads=2
        )
        assert isinstance(decoder, fused.FusedDecoder)
        computed[name] = torch.cat(stepwise_logits(decoder, STEPS))

    first = next(iter(computed.values()))
    assert {name: torch.equal(logits, first) for name, logits in computed.items()} == dict.fromkeys(
        computed, True
    )
