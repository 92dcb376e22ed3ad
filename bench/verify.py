"""What it costs to verify a receipt, as a share of what its answer has cost.

    python -m bench.verify [--model NAME] [--format FORMAT]... [--runs N]

A model answers prompts from a fixed text, one after another, on a single core. A second copy of the
model then computes each answer again from its receipt, as `warren verify` does. Both are measured
in CPU time of the process, without the time in which the models are loaded. An answer that is not
equal ends the benchmark.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.load import LoadError
from bench.machine import describe
from bench.options import RESULTS, Out, Runs
from bench.quality import fixed_text
from bench.report import console, write_json
from cli.terminal import notices
from shared import settings
from shared.messages import (
    Completed,
    GenerationJob,
    Receipt,
    ReceiptChoice,
    ReceiptRun,
    ReceiptUsage,
    SamplingParams,
    TokenPrompt,
    hash_text,
)
from shared.settings import WorkerSettings
from shared.version import VERSION
from worker.checkpoints import store
from worker.decode import served_model
from worker.decode.choices import plan_now, provenance
from worker.decode.recomputation import recompute
from worker.decode.served_model import ServedModel
from worker.offline import LLM

FORMATS = ("float32", "bfloat16", "q8_0")
_DTYPES = ("float32", "bfloat16")
_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """The lengths of a request."""

    prompt_tokens: int
    answer_tokens: int


SHAPES = (
    RequestShape(prompt_tokens=40, answer_tokens=256),
    RequestShape(prompt_tokens=512, answer_tokens=128),
)


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """CPU times in seconds."""

    generating_s: float
    verifying_s: float


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """Medians over the runs of a shape."""

    weights: str
    prompt_tokens: int
    answer_tokens: int
    generating_s: float
    verifying_s: float
    ratio: float


@contextmanager
def copies(directory: Path, weights: str) -> Iterator[tuple[LLM, ServedModel]]:
    """The model that answers, and the model that verifies. Raises `StartupError`."""
    is_dtype = weights in _DTYPES
    options: dict[str, Any] = {
        "dtype": weights if is_dtype else "auto",
        "weight_format": "auto" if is_dtype else weights,
        "device": "cpu",
        "compute_threads": 1,
        "kv_cache_bytes": _KV_CACHE_BYTES,
    }
    verifier = served_model.load(settings.load(WorkerSettings, model=str(directory), **options))
    try:
        with LLM(str(directory), **options) as generator:
            yield generator, verifier
    finally:
        verifier.engine.stop()


def measured(
    generator: LLM, verifier: ServedModel, text: Sequence[int], shape: RequestShape, run: int
) -> CpuTimes:
    """Generate an answer to a part of ``text`` that depends on ``run``, and verify it. Raises
    `LoadError` if the answers are not equal."""
    start = run * shape.prompt_tokens % (len(text) - shape.prompt_tokens)
    prompt = TokenPrompt(token_ids=tuple(text[start : start + shape.prompt_tokens]))
    sampling = SamplingParams(seed=run, max_tokens=shape.answer_tokens, ignore_eos=True)
    began = time.process_time()
    (answer,) = generator.generate(prompt, sampling, progress=False)
    generating_s = time.process_time() - began
    job = GenerationJob(
        request_id="verify",
        model=verifier.name,
        prompts=(prompt,),
        sampling=sampling,
        wants_provenance=True,
    )
    receipt = receipt_of(job, answer, verifier)
    began = time.process_time()
    found = asyncio.run(recompute(job, receipt, verifier, "exact"))
    verifying_s = time.process_time() - began
    if found.differences or found.problem:
        raise LoadError(f"run {run}: {found.problem or found.differences[0]}")
    return CpuTimes(generating_s=generating_s, verifying_s=verifying_s)


def receipt_of(job: GenerationJob, answer: Completed, model: ServedModel) -> Receipt:
    """The receipt of an answer of ``model``. No gateway has signed it."""
    execution = ReceiptRun(
        worker="bench",
        attempt=1,
        numerics=model.numerics,
        num_tokens_before=(0,) * len(answer.choices),
        provenance=provenance(job, plan_now(job, model), model),
    )
    return Receipt(
        id=job.request_id,
        endpoint="completions",
        model=job.model,
        request_sha256="",
        sampling=job.sampling,
        seed=str(job.seed),
        num_choices=job.num_choices,
        choices=tuple(
            ReceiptChoice(
                token_ids=choice.token_ids,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                text_sha256=hash_text([choice.text]),
            )
            for choice in answer.choices
        ),
        usage=ReceiptUsage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
        executions=(execution,),
        created_at=job.created_at,
        issued_at=job.created_at,
        gateway_version=VERSION,
    )


def summary(weights: str, shape: RequestShape, costs: Sequence[CpuTimes]) -> VerifyRow:
    return VerifyRow(
        weights=weights,
        **asdict(shape),
        generating_s=median(cost.generating_s for cost in costs),
        verifying_s=median(cost.verifying_s for cost in costs),
        ratio=median(cost.verifying_s / cost.generating_s for cost in costs),
    )


def rows_of(
    directory: Path,
    weights: str,
    text: Sequence[int],
    runs: int,
    shapes: Sequence[RequestShape] = SHAPES,
) -> list[VerifyRow]:
    """Measure all shapes, after a run that does not count. Raises `StartupError` and
    `LoadError`."""
    with copies(directory, weights) as (generator, verifier):
        return [
            summary(
                weights,
                shape,
                [measured(generator, verifier, text, shape, run) for run in range(runs + 1)][1:],
            )
            for shape in shapes
        ]


def _show(title: str, rows: Sequence[VerifyRow]) -> None:
    table = Table("weights", title=title)
    for heading in ("prompt", "answer", "generating s", "verifying s", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        lens = (str(row.prompt_tokens), str(row.answer_tokens))
        seconds = (f"{row.generating_s:.2f}", f"{row.verifying_s:.2f}")
        table.add_row(row.weights, *lens, *seconds, f"{row.ratio:.2f}x")
    console().print(table)


def main(
    model: Annotated[str, typer.Option(help="As `warren worker` takes it.")] = "smollm2",
    formats: Annotated[
        list[str], typer.Option("--format", help="A dtype or a packed format. Repeatable.")
    ] = list(FORMATS),  # noqa: B006 (typer copies it)
    runs: Runs = 3,
    out: Out = RESULTS,
) -> None:
    directory = store.resolve(model)
    text = fixed_text(directory)
    rows: list[VerifyRow] = []
    for weights in formats:
        notices.print(weights)
        rows += rows_of(directory, weights, text, runs)
    name = store.served_name(model)
    _show(f"{name}, CPU time", rows)
    about = {**describe([]), "model": name, "runs": runs}
    write_json(out / "verify.json", {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    typer.run(main)
