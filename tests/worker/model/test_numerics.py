"""Numerics name what affects the bits of a logit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny import write_tiny_model
from worker.model.loading import load_decoder
from worker.model.numerics import numerics_of

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
