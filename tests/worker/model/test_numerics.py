"""Numerics name what affects the bits of a logit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models.numerics import assert_close
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.decoders.test_native_families import STEPS, stepwise_logits
from worker.model.loading import load_decoder
from worker.model.numerics import kernels_of, numerics_of

SHOW_LIMITED = """
import sys
from pathlib import Path
from worker.model.numerics import limit_cpu_isa, numerics_of

limit_cpu_isa()

import torch
from worker.model.loading import load_decoder

for dtype, kernels in ("float32", "auto"), ("bfloat16", "auto"), ("float32", "reference"):
    decoder = load_decoder(
        Path(sys.argv[1]), dtype=dtype, kernels=kernels, device=torch.device("cpu")
    )
    print(numerics_of(decoder, is_batch_invariant=False))
"""


def test_a_limited_worker_uses_avx2_alone_on_every_processor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")

    # In a process of its own, because torch chooses its instructions when it is imported.
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_LIMITED, str(tmp_path)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
    ).stdout

    assert shown.splitlines() == [
        "cpu fused float32",
        "cpu fused bfloat16",
        "cpu avx2 native float32 reference",
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "expected"),
    [
        ("phi", "float32", "foreign float32 native"),
        ("phi", "float16", "foreign float16 reference"),
        ("llama", "float16", "native float16 reference"),
    ],
)
def test_numerics_name_the_kernels_that_were_chosen(
    tmp_path: Path, family: str, dtype: str, expected: str
) -> None:
    write_tiny_model(tmp_path, family, hidden_size=96, num_attention_heads=6)

    decoder = load_decoder(tmp_path, dtype=dtype, device=torch.device("cpu"))

    numerics = numerics_of(decoder, is_batch_invariant=False)
    assert numerics.split(maxsplit=2)[2] == expected


@pytest.mark.parametrize(
    ("kernels", "weight_format", "expected"),
    [
        ("auto", "auto", "cpu fused bfloat16"),
        ("auto", "q8_0", "cpu fused int8 bfloat16"),
        ("native", "q4_1", "cpu fused int8 bfloat16"),
        ("native-int16", "q8_0", "cpu fused bfloat16"),
    ],
)
def test_numerics_name_the_integers_that_quantized_weights_are_multiplied_by(
    tmp_path: Path, kernels: str, weight_format: str, expected: str
) -> None:
    write_tiny_model(tmp_path, "llama", intermediate_size=64)

    decoder = load_decoder(
        tmp_path,
        dtype="bfloat16",
        weight_format=weight_format,
        kernels=kernels,
        device=torch.device("cpu"),
    )

    numerics = numerics_of(decoder, is_batch_invariant=False)
    assert numerics == expected
    same = load_decoder(
        tmp_path,
        dtype="bfloat16",
        weight_format=weight_format,
        kernels=kernels_of(numerics),
        device=torch.device("cpu"),
    )
    assert numerics_of(same, is_batch_invariant=False) == numerics


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_integers_of_8_bits_change_logits_a_little(tmp_path: Path, family: str) -> None:
    """In a mixture, too, whose experts share a token's integers. All of its experts are chosen, so
    that the rounding changes no choice."""
    write_tiny_model(tmp_path, family, intermediate_size=64, num_local_experts=2)
    fine, coarse = (
        load_decoder(
            tmp_path,
            dtype="float32",
            weight_format="q8_0",
            kernels=kernels,
            device=torch.device("cpu"),
        )
        for kernels in ("native-int16", "native")
    )

    for expected, logits in zip(
        stepwise_logits(fine, STEPS), stepwise_logits(coarse, STEPS), strict=True
    ):
        assert not torch.equal(logits, expected)
        assert_close(logits, expected, 0.2)
