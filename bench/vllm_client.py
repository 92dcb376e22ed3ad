"""The client ``vllm bench serve``, if vLLM is installed; see bench/README.md for its setup."""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.comparison import Client, Setting
from bench.figures import Figures
from bench.load import MODEL, LoadError
from worker.checkpoints import store


def vllm_client(program: str) -> Client:
    """The client of the vLLM with the executable ``program``."""

    def measure(url: str, setting: Setting) -> Figures:
        with TemporaryDirectory(prefix="warren-bench-") as directory:
            result = Path(directory) / "result.json"
            command = [program, "bench", "serve", *_options(url, setting, result)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return figures_of_result(json.loads(result.read_text()), setting.num_requests)

    return measure


def figures_of_result(result: dict[str, Any], num_requests: int) -> Figures:
    """The file that ``--save-result`` wrote. Raises `LoadError` if requests failed."""
    if result["completed"] != num_requests:
        raise LoadError(f"{result['completed']} of {num_requests} requests were answered")
    return Figures(
        tokens_per_s=result["output_throughput"],
        ttft_p50_ms=result["median_ttft_ms"],
        ttft_p99_ms=result["p99_ttft_ms"],
        tpot_p50_ms=result["median_tpot_ms"],
        itl_p99_ms=result["p99_itl_ms"],
        response_mean_ms=result["mean_e2el_ms"],
        response_p90_ms=result["p90_e2el_ms"],
    )


def _options(url: str, setting: Setting, result: Path) -> list[str]:
    named = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": MODEL,
        "tokenizer": store.resolve(MODEL),
        "dataset-name": "random",
        "random-input-len": setting.prompt_len,
        "random-output-len": setting.max_tokens,
        "num-prompts": setting.num_requests,
        "max-concurrency": setting.num_users,
        "seed": setting.seed,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "90,99",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    given = [f"--{name}={value}" for name, value in named.items()]
    return [*given, "--ignore-eos", "--save-result", "--disable-tqdm"]
