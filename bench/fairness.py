"""How tenants share a worker: nine tenants that send single jobs, and a tenant that floods it.

    python -m bench.fairness [--engine synthetic --engine smollm2] [--seconds S] [--broker URL]
    python -m bench.fairness --deadlines-only [--jobs N]

A worker serves over RabbitMQ, started anew for each load. Single jobs are streamed as a gateway
streams them. Their time to first token runs from the publication to the first token in the log, and
their longest gap is the longest time between two events of a stream. The two tenants whose weights
differ get streams, too, because their tokens are counted when they arrive. All other tenants ask
for a single message with the whole answer, so that the client and the broker cost little. No slow
grammar occurs twice: some take half a second of CPU time to compile, some slow down every step,
some are refused.
The throughput comes from the worker's own counters. In the run *as one tenant* all jobs carry the
same tenant, so they are served in the order of their arrival. The other runs are compared with its
throughput, prompts included, because single jobs have more prompt for each generated token than the
jobs of the flood.

With ``--deadlines-only``, the jobs of one tenant that end before their deadlines, first come, first
served and by deadline, in simulated time (`bench.deadlines`).
"""

import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
import uvloop
from rich.table import Table

from bench import deadlines, plots, report
from bench.broker import broker_node
from bench.figures import percentile
from bench.interrupt import ends_on_sigterm
from bench.load import FIRST_ID
from bench.machine import describe
from bench.options import IMAGES, RESULTS, Out
from bench.other_load import OtherLoad
from cli.terminal import notices
from shared import topology
from shared.bus.base import Message, Queue
from shared.bus.rabbit import RabbitBus
from shared.bus.subscribe import receive
from shared.errors import InvalidRequest, Overloaded
from shared.messages import (
    Completed,
    Constraint,
    Failed,
    Finished,
    GenerationJob,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenizeJob,
    TokenPrompt,
    decode_event,
    encode,
)
from tests.support.deployment import processes
from tests.support.deployment.processes import NO_TLS, WarrenProcess

NUM_SLOTS = 16
_STEP_MS = 25.0
_WEIGHTS = {"light": 1.0, "heavy": 3.0}
_COUNTERS = ("warren_worker_generation_tokens_total{", "warren_worker_prompt_tokens_total{")
_NUMBERS = itertools.count()
_WORDS = ("queue", "worker", "stream", "token", "gateway", "broker", "batch", "prompt")
_NUM_WORDS = 70_000
_REFUSALS = {InvalidRequest.code, Overloaded.code}
"""The errors for grammars that are too slow, or too many."""


@dataclass(frozen=True)
class TenantLoad:
    """Tenants that each keep ``num_jobs`` jobs in the system: they replace each job that ends."""

    tenants: Sequence[str]
    num_jobs: int
    max_tokens: int
    prompt_len: int = 64
    num_choices: int = 1
    mode: Literal["stream", "final"] = "final"
    content: Literal["tokens", "slow grammars", "text to tokenize"] = "tokens"
    warm_up_s: float = 4.0
    """From its first jobs to the next load, or to the start of the counting."""


ALONE = "nine tenants alone"
FLOODED = "beside a flood of 100 jobs"
ONE_TENANT = "the same as one tenant"
SINGLES = TenantLoad([f"single-{k}" for k in range(9)], num_jobs=1, max_tokens=32, mode="stream")
FLOOD = TenantLoad(["flood"], num_jobs=100, max_tokens=200)
MANY_CHOICES = TenantLoad(["many"], num_jobs=1, max_tokens=200, num_choices=128)
SLOW_GRAMMARS = TenantLoad(["grammars"], num_jobs=16, max_tokens=50, content="slow grammars")
TOKENIZING = TenantLoad(["tokenizing"], num_jobs=16, max_tokens=1, content="text to tokenize")
"""16 texts of half a megabyte at a time."""
WEIGHTED = TenantLoad(list(_WEIGHTS), num_jobs=40, max_tokens=30, mode="stream", warm_up_s=30.0)
"""The first tenant's first jobs take all slots, which the other has to be given back first."""


@dataclass(frozen=True)
class StreamTimes:
    """The times of a stream."""

    tenant: str
    first_token_s: float
    longest_gap_s: float
    """Between two of its events."""


@dataclass
class EngineRun:
    """A load on an engine, after its warm-up."""

    engine: str
    load: str
    singles: Sequence[StreamTimes]
    """The streams of the tenants that send single jobs."""
    num_received: Counter[str]
    """The tokens that the client has received, by tenant."""
    tokens_per_s: float
    """Generated tokens in a second."""
    tokens_with_prompts_per_s: float
    other_cores: float

    def ttft_ms(self, percent: float) -> float | None:
        """None if no job received a token."""
        times = [stream.first_token_s for stream in self.singles]
        return 1e3 * percentile(times, percent) if times else None


def slow_grammar(number: int) -> Constraint:
    """A grammar that no other number has."""
    numbers = range(number, number + 3000)
    match number % 4:
        case 0:  # its states grow with the text
            return Constraint(kind="regex", source=f"(a|b)*a(a|b){{18}}{number}")
        case 1:
            return Constraint(kind="regex", source="|".join(f"x{k:06d}y" for k in numbers))
        case 2:
            schema: dict[str, Any] = {"anyOf": [{"const": k} for k in numbers]}
        case _:  # refused after a second of CPU time
            schema = {"type": "integer", "multipleOf": 999_000 + number}
    return Constraint(kind="json_schema", source=json.dumps(schema))


class JobClient:
    """Publishes jobs and counts what comes back."""

    def __init__(self, bus: RabbitBus, model: str) -> None:
        self.ended: list[StreamTimes] = []
        self.num_received: Counter[str] = Counter()
        self._bus = bus
        self._model = model
        self._draw = random.Random(0)
        self._answers = topology.quick_replies_queue(f"fairness-{time.monotonic_ns()}")
        self._waiting: dict[str, asyncio.Future[int]] = {}

    async def receive(self) -> None:
        """Pass complete answers on, until cancelled."""
        await receive(self._bus, self._answers, self._receive)

    def _receive(self, message: Message) -> None:
        event = decode_event(message.body)
        num_tokens = 0
        match event:
            case Completed():
                num_tokens = sum(len(one.token_ids) for one in event.choices)
            case Failed() if event.code not in _REFUSALS:
                raise RuntimeError(f"a job failed: {event}")
        self._waiting.pop(message.correlation_id).set_result(num_tokens)

    async def keep_asking(self, load: TenantLoad, tenant: str, sent_as: str) -> None:
        """Send the next job whenever a job ends, until cancelled."""
        while True:
            if load.content == "text to tokenize":
                await self._ask(self._tokenize_job())
                continue
            job = self._generation_job(load, sent_as)
            if load.mode == "stream":
                self.ended.append(await self._stream(job, tenant))
            else:
                self.num_received[tenant] += await self._ask(job)

    def _generation_job(self, load: TenantLoad, tenant: str) -> GenerationJob:
        number = next(_NUMBERS)
        constraint = slow_grammar(number) if load.content == "slow grammars" else None
        sampling = SamplingParams(
            max_tokens=load.max_tokens, ignore_eos=constraint is None, constraint=constraint
        )
        prompt = self._draw.choices(range(FIRST_ID, 49_000), k=load.prompt_len)
        return GenerationJob(
            request_id=f"fairness-{number}-{time.monotonic_ns()}",
            model=self._model,
            prompts=(TokenPrompt(token_ids=tuple(prompt)),),
            num_choices=load.num_choices,
            sampling=sampling,
            mode=load.mode,
            tenant=tenant,
        )

    def _tokenize_job(self) -> TokenizeJob:
        return TokenizeJob(
            request_id=f"fairness-{next(_NUMBERS)}-{time.monotonic_ns()}",
            model=self._model,
            prompt=TextPrompt(text=" ".join(self._draw.choices(_WORDS, k=_NUM_WORDS))),
        )

    async def _ask(self, job: GenerationJob | TokenizeJob) -> int:
        """Return the number of generated tokens."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[job.request_id] = answer
        await self._publish(job, self._answers)
        return await answer

    async def _stream(self, job: GenerationJob, tenant: str) -> StreamTimes:
        """Receive an answer to its end, or to the failure of its job."""
        queue = topology.reply_queue(job.request_id, expires_s=60)
        await self._bus.declare(queue)
        async with self._bus.consume(queue.name, is_exclusive=True) as deliveries:
            times = [time.perf_counter()]
            await self._publish(job, queue)
            async for delivery in deliveries:
                match event := decode_event(delivery.message.body):
                    case TokenDelta() | Finished():
                        times.append(time.perf_counter())
                        self.num_received[tenant] += len(event.token_ids)
                    case Failed():
                        raise RuntimeError(f"a job failed: {event}")
                if isinstance(event, Finished):
                    break
        await self._bus.delete_queue(queue.name)
        waiting_s, *gaps_s = (later - earlier for earlier, later in pairwise(times))
        return StreamTimes(tenant, waiting_s, max(gaps_s, default=0.0))

    async def _publish(self, job: GenerationJob | TokenizeJob, replies: Queue) -> None:
        message = Message(
            encode(job),
            correlation_id=job.request_id,
            reply_to=replies.bindings[0].routing_key,
        )
        kind: topology.Lane = "quick" if isinstance(job, TokenizeJob) else "interactive"
        await self._bus.publish(topology.jobs_binding(job.model, kind), message)


async def measure(
    broker: str,
    worker: WarrenProcess,
    engine: str,
    name: str,
    loads: Sequence[TenantLoad],
    seconds: float,
) -> EngineRun:
    """Start the worker, run ``loads``, in their order, and count after a warm-up."""
    model = "echo" if engine == "synthetic" else engine
    async with RabbitBus(broker) as bus:
        await bus.delete_queue(topology.jobs_queue(model, "interactive").name)
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            await asyncio.to_thread(worker.start)
            stack.push_async_callback(asyncio.to_thread, worker.terminate)
            await asyncio.to_thread(worker.wait_healthy)
            client = JobClient(bus, model)
            asking = [tasks.create_task(client.receive())]
            for load in loads:
                for tenant in load.tenants:
                    sent_as = "all" if name == ONE_TENANT else tenant
                    asking += [
                        tasks.create_task(client.keep_asking(load, tenant, sent_as))
                        for _ in range(load.num_jobs)
                    ]
                await asyncio.sleep(load.warm_up_s)
            client.ended.clear()
            client.num_received.clear()
            others, start, before = OtherLoad(), time.perf_counter(), await _num_tokens(worker)
            await asyncio.sleep(seconds)
            after = await _num_tokens(worker)
            elapsed_s = time.perf_counter() - start
            num_generated, num_in_prompts = (b - a for a, b in zip(before, after, strict=True))
            run = EngineRun(
                engine,
                name,
                [stream for stream in client.ended if stream.tenant in SINGLES.tenants],
                client.num_received.copy(),
                num_generated / elapsed_s,
                (num_generated + num_in_prompts) / elapsed_s,
                others.cores(),
            )
            for task in asking:
                task.cancel()
    return run


async def _num_tokens(worker: WarrenProcess) -> list[float]:
    """The tokens that the worker has generated, and the prompt tokens that it has read."""
    async with httpx.AsyncClient(verify=NO_TLS, timeout=60) as client:
        lines = (await client.get(f"{worker.url}/metrics")).text.splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counter))
        for counter in _COUNTERS
    ]


def _worker(engine: str, broker: str, log: Path) -> WarrenProcess:
    weights = ",".join(f"{name}={weight:g}" for name, weight in _WEIGHTS.items())
    variables = {
        "WARREN_TENANT_WEIGHTS": weights,
        "WARREN_MAX_NUM_SEQS": str(NUM_SLOTS),
        "WARREN_DRAIN_GRACE_S": "0.1",
    }
    if engine == "synthetic":
        return processes.echo_worker(broker, log, f"--step-ms={_STEP_MS:g}", **variables)
    return processes.worker(broker, log, f"--model={engine}", **variables)


def measure_engine(broker: str, engine: str, seconds: float) -> list[EngineRun]:
    """All loads in sequence."""
    loads = {
        ALONE: [SINGLES],
        FLOODED: [FLOOD, SINGLES],
        ONE_TENANT: [FLOOD, SINGLES],
        "beside one request for 128 answers": [MANY_CHOICES, SINGLES],
        "beside slow grammars": [SLOW_GRAMMARS, SINGLES],
        "beside megabytes to tokenize": [TOKENIZING, SINGLES],
        "two tenants of weights 1 and 3": [WEIGHTED],
    }
    runs = []
    for name, parts in loads.items():
        notices.print(f"{engine}: {name}")
        with (
            tempfile.TemporaryDirectory() as directory,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            worker = _worker(engine, broker, Path(directory) / "worker")
            runs.append(runner.run(measure(broker, worker, engine, name, parts, seconds)))
    return runs


def summary(runs: Sequence[EngineRun]) -> list[dict[str, Any]]:
    """The figures of the table. Each ratio names the run of the same engine that it refers to."""
    rows = []
    for run in runs:
        same = {other.load: other for other in runs if other.engine == run.engine}
        p95, p95_alone = run.ttft_ms(95), same[ALONE].ttft_ms(95)
        light, heavy = (run.num_received[tenant] for tenant in _WEIGHTS)
        rows.append(
            {
                "engine": run.engine,
                "load": run.load,
                "num_jobs": len(run.singles),
                "ttft_p50_ms": run.ttft_ms(50),
                "ttft_p95_ms": p95,
                "ttft_max_ms": run.ttft_ms(100),
                "gap_max_ms": 1e3
                * max((stream.longest_gap_s for stream in run.singles), default=0.0),
                "p95_ratio_to_alone": p95 / p95_alone if p95 and p95_alone else None,
                "tokens_per_s": run.tokens_per_s,
                "tokens_with_prompts_per_s": run.tokens_with_prompts_per_s,
                "throughput_ratio_to_one_tenant": run.tokens_with_prompts_per_s
                / same[ONE_TENANT].tokens_with_prompts_per_s
                if run.load == FLOODED
                else None,
                "heavy_to_light_tokens": heavy / light if light else None,
                "other_cores": run.other_cores,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("jobs", "num_jobs", "{:.0f}".format),
        ("TTFT ms: p50", "ttft_p50_ms", "{:.0f}".format),
        ("p95", "ttft_p95_ms", "{:.0f}".format),
        ("max", "ttft_max_ms", "{:.0f}".format),
        ("longest gap", "gap_max_ms", "{:.0f}".format),
        ("p95 to alone", "p95_ratio_to_alone", "{:.2f}x".format),
        ("tok/s", "tokens_per_s", "{:.0f}".format),
        ("with prompts", "tokens_with_prompts_per_s", "{:.0f}".format),
        ("to one tenant", "throughput_ratio_to_one_tenant", "{:.2f}x".format),
        ("3 : 1", "heavy_to_light_tokens", "{:.2f}".format),
        ("others", "other_cores", "{:.1f}".format),
    ]
    table = Table("engine", "load", title="Nine tenants that send single jobs")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = ("" if row[key] is None else text(row[key]) for _, key, text in columns)
        table.add_row(row["engine"], row["load"], *cells)
    report.console().print(table)


def draw(path: Path, runs: Sequence[EngineRun]) -> None:
    """The distribution of the time to first token, with a panel for each engine."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    figure, axes = plots.new_figure(len(engines))
    for axis, engine in zip(axes, engines, strict=True):
        for run in runs:
            if run.engine != engine or not run.singles:
                continue
            times = sorted(stream.first_token_s for stream in run.singles)
            shares = [100 * (rank + 1) / len(times) for rank in range(len(times))]
            axis.plot([1e3 * time_s for time_s in times], shares, label=run.load)
        axis.set_xscale("log")
        axis.set_title(engine)
        plots.label_axis(axis, "time to first token, ms", "jobs of the nine tenants, %")
    axes[0].legend(fontsize="small")
    plots.save(figure, path)


@ends_on_sigterm
def main(
    engines: Annotated[
        list[str], typer.Option("--engine", help="synthetic, or a model. Repeatable.")
    ] = ["synthetic", "smollm2"],  # noqa: B006 (typer copies it)
    broker: Annotated[
        str | None, typer.Option(help="AMQP URL; default: a node of its own.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each load.")] = 30.0,
    out: Out = RESULTS,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = (
        IMAGES / "fairness.svg"
    ),
    deadlines_only: Annotated[bool, typer.Option(help="Only the deadlines, simulated.")] = False,
    jobs: Annotated[int, typer.Option(min=40, help="With --deadlines-only.")] = 1000,
) -> None:
    if deadlines_only:
        in_time = deadlines.measure(jobs)
        deadlines.show(in_time)
        served = [asdict(row) for row in in_time]
        report.write_json(out / "deadlines.json", {**describe([]), "rows": served})
        return
    with broker_node(broker) as node:
        runs = [run for engine in engines for run in measure_engine(node.url, engine, seconds)]
    rows = summary(runs)
    show(rows)
    loads = [
        asdict(load) for load in (SINGLES, FLOOD, MANY_CHOICES, SLOW_GRAMMARS, TOKENIZING, WEIGHTED)
    ]
    given = {name: value for name, value in os.environ.items() if name.startswith("WARREN_")}
    about = {**describe([]), "environment": given, "slots": NUM_SLOTS, "step_ms": _STEP_MS}
    about["loads"] = loads
    report.write_json(out / "fairness.json", {**about, "rows": rows})
    draw(picture, runs)


if __name__ == "__main__":
    typer.run(main)
