"""Batches over HTTP: how fast and in how much memory large files are checked, and throughput.

    python -m bench.batches --check-only [--lines N]...
    python -m bench.batches --order-only [--lines N]... [--workers N] [--prefixes N]
                            [--prefix-tokens N]
    python -m bench.batches [--lines N]... [--tokens N] [--step-ms MS] [--model NAME]...
                            [--vllm PATH] [--vllm-dtype DTYPE]... [--http-only]
    python -m bench.batches --duplicates SHARE [--lines N] [--tokens N] [--model NAME]

The check: files of short chats are uploaded to a gateway and checked. Their last line is not valid,
so that nothing is run. The memory is the peak resident memory of the gateway's process, which
serves one file only; broker and worker are in its memory.

Throughput: a batch of chats with as many tokens in as out, from its creation to its output file,
beside the engine alone with the same prompts, which all are there from the start. The synthetic
engine (``echo``) only sleeps; its pace is set so that the engine is the limit. ``vllm run-batch``
answers the file of a real model, too, if vLLM is there; the time for a file of one line, which is
its start, is subtracted. It answers that file twice, because its first start compiles. The memory
is the peak resident memory of the gateway's process. With ``--http-only`` nothing else runs: the
engine alone has all prompts of a large file in its memory. With ``--duplicates``, a share of the
lines repeats other lines, which the gateway computes once and the engine alone computes each time.

The order: lines that share system prompts, and lines of different lengths, in the order of their
file and in that in which batches run them, by the engine in simulated time (`bench.batch_order`)
and by a batch over HTTP with several workers (`bench.batch_fleet`).
"""

import asyncio
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from bench import batch_fleet, batch_order, echo_worker, machine
from bench.batch_client import URL, BatchClient
from bench.batch_fleet import WORDS
from bench.broker import broker_node
from bench.interrupt import ends_on_sigterm
from bench.options import RESULTS, Out, Runs
from bench.other_load import OtherLoad
from bench.report import console, write_json
from bench.servers import wait_served
from shared import settings
from shared.messages import ChatMessage, ChatPrompt, SamplingParams
from shared.settings import WorkerSettings
from tests.support.deployment import processes
from tests.support.deployment.processes import WarrenProcess
from tests.support.gateway.lone_gateway import lone_gateway, peak_memory_bytes
from tests.support.workers import scripted_worker
from worker.checkpoints import store
from worker.decode import served_model
from worker.decode.bridge import Generations
from worker.decode.served_model import ServedModel
from worker.engine.interface import SequenceId, Submit
from worker.text import Tokenizer

_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Check:
    """The upload and the check of a file."""

    num_lines: int
    num_bytes: int
    upload_s: float
    check_s: float
    memory_bytes: int
    """Peak resident memory before the upload."""
    upload_memory_bytes: int
    check_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A batch, or the same work done otherwise."""

    system: str
    model: str
    num_lines: int
    seconds: float
    tokens_per_s: float
    """Output tokens."""
    other_cores: float
    """Cores that processes outside the benchmark used."""
    duplicates: float = 0.0
    """The share of lines that repeat another line."""
    memory_bytes: int | None = None
    """Peak resident memory of the gateway."""


class MeasuredRun(NamedTuple):
    """A run of a system."""

    seconds: float
    memory_bytes: int | None = None


@contextmanager
def _deployment(
    broker: str, directory: Path, model: str, step_ms: float, *options: str
) -> Iterator[WarrenProcess]:
    """The gateway of a deployment whose worker serves a model."""
    log = directory / "worker.log"
    worker = (
        processes.echo_worker(broker, log, f"--step-ms={step_ms}")
        if model == echo_worker.MODEL
        else processes.worker(broker, log, f"--model={model}", f"--served-name={model}")
    )
    shared = (f"--data-dir={directory / 'data'}", "--log-level=warning")
    gateway = processes.gateway(broker, directory / "gateway.log", *shared, *options)
    with worker, gateway:
        wait_served(gateway.url, model)
        yield gateway


def _write(path: Path, num_lines: int, body: Callable[[int], dict[str, Any]]) -> None:
    with path.open("w") as lines:
        for k in range(num_lines):
            line = {"custom_id": f"line-{k}", "method": "POST", "url": URL, "body": body(k)}
            lines.write(f"{json.dumps(line)}\n")


def _chat(model: str, content: str, **more: object) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def _checked(num_lines: int) -> Check:
    with tempfile.TemporaryDirectory(prefix="warren-bench-") as name:
        directory = Path(name)
        gateway = lone_gateway(
            directory / "gateway.log",
            WARREN_DATA_DIR=str(directory / "data"),
            WARREN_MAX_FILE_BYTES=str(_NO_LIMIT),
            WARREN_MAX_TENANT_BYTES=str(_NO_LIMIT),
        )
        first, path = directory / "first.jsonl", directory / "lines.jsonl"
        first.write_text("not valid\n")
        _write(path, num_lines, lambda k: _chat(scripted_worker.MODEL, f"Question {k}"))
        with path.open("a") as lines:
            lines.write("not valid\n")
        with gateway, BatchClient(gateway.url) as client:
            wait_served(gateway.url, scripted_worker.MODEL)
            client.run(client.upload(first))  # opens the database
            return _check(client, gateway, path, num_lines)


def _check(client: BatchClient, gateway: WarrenProcess, path: Path, num_lines: int) -> Check:
    memory_bytes = peak_memory_bytes(gateway)
    began = time.perf_counter()
    file_id = client.upload(path)
    uploaded = time.perf_counter()
    upload_memory_bytes = peak_memory_bytes(gateway)
    batch = client.run(file_id)
    ended = time.perf_counter()
    (error,) = batch["errors"]["data"]
    if error["line"] != num_lines + 1:
        raise RuntimeError(f"another line is not valid: {error}")
    return Check(
        num_lines=num_lines,
        num_bytes=path.stat().st_size,
        upload_s=uploaded - began,
        check_s=ended - uploaded,
        memory_bytes=memory_bytes,
        upload_memory_bytes=upload_memory_bytes,
        check_memory_bytes=peak_memory_bytes(gateway),
    )


def _show_checks(checks: Sequence[Check]) -> None:
    table = Table("lines", "MiB", title="The check of large files")
    for heading in ("upload s", "check s", "lines/s", "memory MiB", "after upload", "after check"):
        table.add_column(heading, justify="right")
    for one in checks:
        memory = (one.memory_bytes, one.upload_memory_bytes, one.check_memory_bytes)
        table.add_row(
            f"{one.num_lines:,}",
            f"{one.num_bytes / (1 << 20):.1f}",
            f"{one.upload_s:.1f}",
            f"{one.check_s:.1f}",
            f"{one.num_lines / one.check_s:,.0f}",
            *(f"{num_bytes / (1 << 20):.0f}" for num_bytes in memory),
        )
    console().print(table)


@dataclass(frozen=True, kw_only=True)
class ChatWork:
    """Chats with the same number of tokens in and out."""

    model: str
    contents: Sequence[str]
    num_tokens: int
    step_ms: float
    """The duration of a step of the synthetic engine."""
    duplicates: float = 0.0
    """The share of lines that repeat another line."""

    @classmethod
    def draw(
        cls,
        model: str,
        num_lines: int,
        num_tokens: int,
        step_ms: float,
        duplicates: float = 0.0,
    ) -> "ChatWork":
        tokenizer = Tokenizer.load(store.resolve(_checkpoint(model)))
        num_words = num_tokens - len(tokenizer.encode(chat_prompt("")))
        if num_words < 1:
            raise typer.BadParameter("fewer tokens than the chat template has")
        draw = random.Random(0)
        num_distinct = max(1, round(num_lines * (1 - duplicates)))
        if len(WORDS) ** num_words < 1.5 * num_distinct:
            raise typer.BadParameter("too few tokens for so many different lines")
        different: set[str] = set()
        while len(different) < num_distinct:
            different.add(" " + " ".join(draw.choices(WORDS, k=num_words)))
        contents = sorted(different)
        contents += draw.choices(contents, k=num_lines - num_distinct)
        draw.shuffle(contents)
        return cls(
            model=model,
            contents=contents,
            num_tokens=num_tokens,
            step_ms=step_ms,
            duplicates=duplicates,
        )

    def write(self, path: Path, num_lines: int | None = None) -> None:
        """Write the input file, or that of the first lines alone."""
        options = {"max_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True}
        num_lines = len(self.contents) if num_lines is None else num_lines
        _write(path, num_lines, lambda k: _chat(self.model, self.contents[k], **options))

    def load(self) -> ServedModel:
        if self.model == echo_worker.MODEL:
            return echo_worker.echo_model(settings.load(WorkerSettings), self.step_ms / 1e3)
        return served_model.load(settings.load(WorkerSettings, model=self.model))


def _checkpoint(model: str) -> str:
    return settings.DEFAULT_MODEL if model == echo_worker.MODEL else model


def chat_prompt(content: str) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=content),))


async def _alone(work: ChatWork) -> float:
    """Seconds for the work on the engine alone, in the batch class as a batch's."""
    served = work.load()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    submits = [
        Submit(
            SequenceId(str(k), 0),
            served.tokenizer.encode(chat_prompt(content)),
            sampling,
            0,
            work.num_tokens,
            job_class="batch",
        )
        for k, content in enumerate(work.contents)
    ]
    async with Generations(served.engine, math.inf) as generations:
        await _run(generations, submits[:2])
        began = time.perf_counter()
        num_outputs = await _run(generations, submits)
        seconds = time.perf_counter() - began
    if num_outputs != len(submits) * work.num_tokens:
        raise RuntimeError(f"{num_outputs} tokens came")
    return seconds


async def _run(generations: Generations, submits: Sequence[Submit]) -> int:
    """Run the sequences to their end; returns the number of their tokens."""
    has_news = asyncio.Event()
    generation = generations.open(submits, has_news.set)
    num_outputs = num_ended = 0
    while num_ended < len(submits):
        await has_news.wait()
        has_news.clear()
        news = generation.take()
        if news is not None:
            num_outputs += len(news.outputs)
            num_ended += sum(output.finish_reason is not None for output in news.outputs)
    generation.close()
    return num_outputs


def _run_alone(work: ChatWork) -> float:
    return asyncio.run(_alone(work))


def _alone_in_a_process(work: ChatWork) -> MeasuredRun:
    """`_alone`, whose memory and threads are gone afterwards."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return MeasuredRun(pool.submit(_run_alone, work).result())


def _over_http(broker: str, work: ChatWork) -> MeasuredRun:
    """The time from the creation of a batch to its output file."""
    with tempfile.TemporaryDirectory(prefix="warren-bench-") as name:
        directory = Path(name)
        path = directory / "lines.jsonl"
        work.write(path)
        limits = (
            f"--max-file-bytes={_NO_LIMIT}",
            f"--max-tenant-bytes={_NO_LIMIT}",
        )
        with (
            _deployment(broker, directory, work.model, work.step_ms, *limits) as gateway,
            BatchClient(gateway.url) as client,
        ):
            file_id = client.upload(path)
            began = time.perf_counter()
            batch = client.run(file_id)
            measured = MeasuredRun(time.perf_counter() - began, peak_memory_bytes(gateway))
    if batch["request_counts"]["completed"] != len(work.contents):
        raise RuntimeError(f"not all lines were answered: {batch}")
    return measured


def run_vllm(program: str, work: ChatWork, dtype: str = "auto") -> float:
    """How much longer ``vllm run-batch`` takes than for a file of one line, in seconds."""
    with tempfile.TemporaryDirectory(prefix="warren-bench-") as name:
        source, target = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        command = [program, "run-batch", "-i", str(source), "-o", str(target)]
        model = str(store.resolve(work.model))
        served = ["--model", model, "--served-model-name", work.model, "--dtype", dtype]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
        times = []
        for num_lines in (1, 1, len(work.contents)):
            work.write(source, num_lines)
            began = time.perf_counter()
            subprocess.run([*command, *served], env={**os.environ, **variables}, check=True)
            times.append(time.perf_counter() - began)
            if len(target.read_text().splitlines()) != num_lines:
                raise RuntimeError("not all lines were answered")
    return times[2] - times[1]


def _with_vllm(program: str, work: ChatWork, dtype: str) -> MeasuredRun:
    return MeasuredRun(run_vllm(program, work, dtype))


def _throughput(
    broker: str,
    work: ChatWork,
    vllm: str | None,
    vllm_dtypes: Sequence[str],
    runs: int,
    *,
    is_http_only: bool,
) -> list[Throughput]:
    systems: dict[str, Callable[[], MeasuredRun]] = {
        "engine alone": lambda: _alone_in_a_process(work),
        "HTTP batch": lambda: _over_http(broker, work),
    }
    if is_http_only:
        del systems["engine alone"]
    elif vllm is not None and work.model != echo_worker.MODEL:
        for dtype in vllm_dtypes:
            systems[f"vllm run-batch, {dtype}"] = partial(_with_vllm, vllm, work, dtype)
    times: dict[str, list[MeasuredRun]] = {name: [] for name in systems}
    others: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(runs):
        for name, measure in systems.items():
            load = OtherLoad()
            times[name].append(measure())
            others[name].append(load.cores())
    return [
        Throughput(
            system=name,
            model=work.model,
            num_lines=len(work.contents),
            seconds=(seconds := statistics.median(one.seconds for one in times[name])),
            tokens_per_s=len(work.contents) * work.num_tokens / seconds,
            other_cores=max(others[name]),
            duplicates=work.duplicates,
            memory_bytes=max(one.memory_bytes or 0 for one in times[name]) or None,
        )
        for name in systems
    ]


def _show_throughput(rows: Sequence[Throughput]) -> None:
    table = Table("model", "system", title="Throughput of a batch")
    for heading in (
        "lines",
        "duplicates",
        "seconds",
        "tok/s",
        "of the engine",
        "memory MiB",
        "others",
    ):
        table.add_column(heading, justify="right")
    alone = {row.model: row.seconds for row in rows if row.system == "engine alone"}
    for row in rows:
        table.add_row(
            row.model,
            row.system,
            f"{row.num_lines:,}",
            f"{row.duplicates:.0%}",
            f"{row.seconds:.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{alone[row.model] / row.seconds:.3f}" if row.model in alone else "",
            f"{row.memory_bytes / (1 << 20):.0f}" if row.memory_bytes is not None else "",
            f"{row.other_cores:.1f}",
        )
    console().print(table)


@ends_on_sigterm
def main(
    lines: Annotated[
        list[int] | None, typer.Option(min=1, help="Of the file: one for all models, or for each.")
    ] = None,
    check_only: Annotated[bool, typer.Option(help="Check files, and run nothing.")] = False,
    order_only: Annotated[bool, typer.Option(help="Compare orders of lines.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --order-only: over HTTP.")] = 2,
    prefixes: Annotated[int, typer.Option(min=1, help="With --order-only: system prompts.")] = 10,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 1000,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt, and of each answer.")
    ] = 64,
    model: Annotated[
        list[str] | None, typer.Option(help="echo, smollm2. Repeatable; none: both.")
    ] = None,
    step_ms: Annotated[float, typer.Option(help="Of the synthetic engine.")] = 40.0,
    duplicates: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of lines that repeat another; only over HTTP, with and without.",
        ),
    ] = 0.0,
    runs: Runs = 1,
    vllm: Annotated[str | None, typer.Option(help="vLLM's command; none: in PATH.")] = None,
    vllm_dtype: Annotated[list[str] | None, typer.Option(help="Its weights. Repeatable.")] = None,
    http_only: Annotated[bool, typer.Option(help="Only the batch over HTTP.")] = False,
    broker: Annotated[
        str | None,
        typer.Option(envvar="WARREN_TEST_AMQP_URL", help="AMQP URL; default: a node of its own."),
    ] = None,
    out: Out = RESULTS,
) -> None:
    """Measure, and print a table."""
    about = machine.describe([])
    if check_only:
        checks = [_checked(num_lines) for num_lines in lines or [1000, 1_000_000]]
        _show_checks(checks)
        return _save(out / "batch-check.json", about, checks)
    if order_only:
        path, nums_lines = out / "batch-order.json", lines or [1000]
        return _compare_orders(path, about, broker, nums_lines, workers, prefixes, prefix_tokens)
    models = model or [echo_worker.MODEL, settings.DEFAULT_MODEL]
    given = lines or [10_000]
    if len(given) not in (1, len(models)):
        raise typer.BadParameter("--lines must be given once, or once for each model")
    sizes = given * len(models) if len(given) == 1 else given
    works = [
        ChatWork.draw(name, num_lines, tokens, step_ms, share)
        for name, num_lines in zip(models, sizes, strict=True)
        for share in sorted({0.0, duplicates})
    ]
    is_http_only = http_only or duplicates > 0
    program, dtypes = vllm or shutil.which("vllm"), vllm_dtype or ["bfloat16"]
    with broker_node(broker) as node:
        rows = [
            row
            for work in works
            for row in _throughput(node.url, work, program, dtypes, runs, is_http_only=is_http_only)
        ]
    _show_throughput(rows)
    return _save(out / ("batch-duplicates.json" if duplicates else "batches.json"), about, rows)


def _compare_orders(
    path: Path,
    about: dict[str, Any],
    broker: str | None,
    nums_lines: Sequence[int],
    num_workers: int,
    num_prefixes: int,
    prefix_tokens: int,
) -> None:
    """Compare the orders of files with so many lines, in simulated time and over HTTP."""
    simulated = [
        row
        for num_lines in nums_lines
        for row in batch_order.measure(num_lines, num_prefixes, prefix_tokens)
    ]
    batch_order.show(simulated)
    with broker_node(broker) as node:
        of_fleets = [
            row
            for num_lines in nums_lines
            for row in batch_fleet.measure(
                node.url, num_workers, num_lines, num_prefixes, prefix_tokens
            )
        ]
    batch_fleet.show(of_fleets)
    rows, over_http = map(asdict, simulated), map(asdict, of_fleets)
    write_json(path, {**about, "rows": list(rows), "over_http": list(over_http)})


def _save(path: Path, about: dict[str, Any], rows: Sequence[Check | Throughput]) -> None:
    write_json(path, {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    typer.run(main)
