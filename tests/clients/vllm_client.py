"""``vllm bench serve``: random tokens to completions and to chats."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.checks import equal, report, target

TARGET = target()
NUM_REQUESTS, NUM_TOKENS = 8, 16
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def bench(backend: str) -> None:
    with TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        options = {
            "backend": backend,
            "base-url": TARGET.url,
            "endpoint": ENDPOINTS[backend],
            "model": TARGET.model,
            "tokenizer": TARGET.model_directory,
            "dataset-name": "random",
            "random-input-len": 32,
            "random-output-len": NUM_TOKENS,
            "num-prompts": NUM_REQUESTS,
            "max-concurrency": 4,
            "result-dir": directory,
            "result-filename": result.name,
        }
        named = [f"--{name}={value}" for name, value in options.items()]
        program = Path(sys.executable).with_name("vllm")
        subprocess.run(
            [program, "bench", "serve", *named, "--ignore-eos", "--save-result", "--disable-tqdm"],
            env={**os.environ, "OPENAI_API_KEY": TARGET.api_key},
            stdout=sys.stderr,
            check=True,
        )
        found = json.loads(result.read_text())
    equal(
        (found["completed"], found["total_output_tokens"]),
        (NUM_REQUESTS, NUM_REQUESTS * NUM_TOKENS),
    )


if __name__ == "__main__":
    for backend in ENDPOINTS:
        report(f"--backend {backend}", partial(bench, backend))
