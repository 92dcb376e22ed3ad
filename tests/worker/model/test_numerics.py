"""Numerics name what affects the bits of a logit."""

import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny import write_tiny_model

SHOW_LIMITED = """
import sys
from pathlib import Path
from worker.model.numerics import limit_cpu_isa, numerics_of

limit_cpu_isa("avx2")

import torch
from worker.model.loading import load_decoder

for dtype, kernels in ("float32", "auto"), ("bfloat16", "auto"), ("float32", "reference"):
    decoder = load_decoder(
        Path(sys.argv[1]), dtype=dtype, kernels=kernels, device=torch.device("cpu")
    )
    print(numerics_of(decoder, kernels, is_batch_invariant=False))
"""


def test_a_limited_worker_uses_avx2_alone_on_every_processor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")

    # In a process of its own, because torch chooses its instructions when it is imported.
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_LIMITED, str(tmp_path)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout

    assert shown.splitlines() == [
        "cpu fused float32",
        "cpu fused bfloat16",
        "cpu avx2 native float32 reference",
    ]
