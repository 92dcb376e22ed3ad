"""lm-evaluation-harness: the same tasks through Warren and through transformers, both in fp32.

The tasks use every kind of request. A log probability may differ by as much as another order of
summation in fp32 causes; greedy text must be equal.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.checks import equal, report, target

TASKS = ("capitals", "endings", "texts", "continuations")
_TOLERANCE = 5e-5
"""The maximum difference of a token's log probability."""
_DIRECTORY = Path(__file__).with_name("lm_eval_tasks")
_TARGET = target()

Samples = dict[str, list[dict[str, Any]]]


def evaluate(directory: Path, model: str, *options: str) -> Samples:
    """Run all tasks; returns the logged results of each question, by task."""
    names = ",".join(f"warren_{task}" for task in TASKS)
    command = [sys.executable, "-m", "lm_eval", "run", "--include_path=.", f"--tasks={names}"]
    command += [f"--model={model}", *options, f"--output_path={directory / model}"]
    variables = {
        "OPENAI_API_KEY": _TARGET.api_key,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(directory / "datasets"),
    }
    subprocess.run(
        [*command, "--log_samples"],
        cwd=_DIRECTORY,
        env={**os.environ, **variables},
        stdout=sys.stderr,
        check=True,
    )
    return {task: _logged(directory / model, task) for task in TASKS}


def _logged(directory: Path, task: str) -> list[dict[str, Any]]:
    (path,) = directory.glob(f"*/samples_warren_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: int(line["doc_id"]))


def same_scores(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    equal(len(ours), len(theirs))
    for our, their in zip(map(scores, ours), map(scores, theirs), strict=True):
        for (our_sum, *our_rest), (their_sum, *their_rest) in zip(our, their, strict=True):
            equal(our_rest, their_rest)
            gap = abs(float(our_sum) - float(their_sum))
            assert gap <= _TOLERANCE * max(1.0, abs(float(their_sum))), (our, their)


def scores(sample: dict[str, Any]) -> Iterator[list[str]]:
    """The sum of log probabilities of each continuation, and whether it is greedy."""
    for (response,) in sample["resps"]:
        yield response if isinstance(response, list) else [response]


def same_text(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    equal([sample["resps"] for sample in ours], [sample["resps"] for sample in theirs])


def main() -> None:
    with TemporaryDirectory() as name:
        directory, tokenizer = Path(name), _TARGET.model_directory
        hf = (f"--model_args=pretrained={tokenizer},dtype=float32", "--device=cpu")
        api = f"model={_TARGET.model},base_url={_TARGET.url}/v1/completions,tokenizer={tokenizer}"
        ours = evaluate(
            directory, "local-completions", f"--model_args={api},num_concurrent=4", "--batch_size=4"
        )
        theirs = evaluate(directory, "hf", *hf, "--batch_size=8")
    for task in TASKS:
        compare: Callable[..., None] = same_text if task == "continuations" else same_scores
        report(f"{task}: as through transformers", partial(compare, ours[task], theirs[task]))


if __name__ == "__main__":
    main()
