"""The gateway's image is small because the gateway does not import torch."""

import subprocess
import sys

SCRIPT = """
import sys
import gateway.app, gateway.server
heavy = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "kernels"}
print(sorted(heavy & set(sys.modules)))
"""


def test_the_gateway_imports_nothing_that_computes() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
