"""guidellm: a benchmark with chats and a benchmark with completions."""

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


def benchmark(endpoint: str) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        backend = f"target={TARGET.url},model={TARGET.model},api_key={TARGET.api_key}"
        options = {
            "backend": f"kind=openai_http,request_format={endpoint},{backend}",
            "profile": "kind=concurrent,streams=4",
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={TARGET.model_directory}",
            "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
            "output": f"kind=json,path={path}",
        }
        named = [f"--{name}={value}" for name, value in options.items()]
        program = Path(sys.executable).with_name("guidellm")
        subprocess.run(
            [program, "run", *named, "--disable-console-interactive"],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=sys.stderr,
            check=True,
        )
        (found,) = json.loads(path.read_text())["benchmarks"]
    totals, answered = found["metrics"]["request_totals"], found["requests"]["successful"]
    equal((totals["successful"], totals["errored"]), (NUM_REQUESTS, 0))
    equal([request["output_tokens"] for request in answered], [NUM_TOKENS] * NUM_REQUESTS)


if __name__ == "__main__":
    for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        report(endpoint, partial(benchmark, endpoint))
