"""How tenants share a worker: nine that send single jobs, beside one that floods it.

    python -m bench.fairness [--engine synthetic --engine smollm2] [--seconds S] [--broker URL]

One worker serves over RabbitMQ. The client publishes jobs as a gateway does and reads their logs;
the time to first token is that from the publication to the first token in the log. In the run *as
one tenant* all jobs carry the same tenant, so they are served in the order of their arrival: it is
what the throughput is compared with.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from bench import plots, report
from bench.broker import broker_node
from bench.figures import percentile
from bench.interrupt import ends_on_sigterm
from bench.load import FIRST_ID
from bench.machine import describe
from bench.options import Out
from bench.other_load import OtherLoad
from cli.terminal import notices
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.errors import BusError
from shared.messages import (
    Failed,
    Finished,
    GenerationJob,
    SamplingParams,
    TokenDelta,
    TokenPrompt,
    decode_event,
    encode,
)
from tests.support import processes
from tests.support.processes import WarrenProcess

RESULTS = Path(__file__).parent / "results"
NUM_SLOTS = 16
_STEP_MS = 25.0
_WARM_UP_S = 4.0
_WEIGHTS = {"light": 1.0, "heavy": 3.0}
_MAX_PUBLISHING = 8
"""The broker takes milliseconds for each of these; a flood at once would exceed its time limit."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Load:
    """Tenants that each keep ``num_jobs`` jobs in the system, and send another when one ends."""

    tenants: Sequence[str]
    num_jobs: int
    max_tokens: int
    prompt_len: int = 64
    num_choices: int = 1


SINGLES = Load([f"single-{number}" for number in range(9)], num_jobs=1, max_tokens=32)
FLOOD = Load(["flood"], num_jobs=100, max_tokens=200)
MANY_CHOICES = Load(["many"], num_jobs=1, max_tokens=200, num_choices=128)
WEIGHTED = [Load([tenant], num_jobs=40, max_tokens=60) for tenant in _WEIGHTS]


@dataclass
class Run:
    """One load on one engine, after its warm-up."""

    engine: str
    load: str
    seconds: float
    first_token_s: list[float] = field(default_factory=list)
    """Of the tenants that send single jobs."""
    num_tokens: Counter[str] = field(default_factory=Counter)
    """By tenant."""
    other_cores: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens.total() / self.seconds

    def ttft_ms(self, percent: float) -> float | None:
        """None if no job received a token."""
        return 1e3 * percentile(self.first_token_s, percent) if self.first_token_s else None


class Client:
    """Publishes jobs and counts what comes back."""

    def __init__(self, bus: RabbitBus, model: str) -> None:
        self._bus = bus
        self._model = model
        self._draw = random.Random(0)
        self._publishing = asyncio.Semaphore(_MAX_PUBLISHING)
        self.first_token_s: defaultdict[str, list[float]] = defaultdict(list)
        self.num_tokens: Counter[str] = Counter()

    async def keep_asking(self, load: Load, tenant: str, sent_as: str) -> None:
        """Send one job after another until cancelled."""
        while True:
            prompt = self._draw.choices(range(FIRST_ID, 49_000), k=load.prompt_len)
            job = GenerationJob(
                request_id=f"fairness-{next(_NUMBERS)}-{time.monotonic_ns()}",
                model=self._model,
                prompts=(TokenPrompt(token_ids=tuple(prompt)),),
                num_choices=load.num_choices,
                sampling=SamplingParams(max_tokens=load.max_tokens, ignore_eos=True),
                mode="stream",
                tenant=sent_as,
            )
            async for is_first, num_tokens, after_s in self._ask(job):
                if is_first:
                    self.first_token_s[tenant].append(after_s)
                self.num_tokens[tenant] += num_tokens

    async def _ask(self, job: GenerationJob) -> AsyncIterator[tuple[bool, int, float]]:
        """For each event with tokens: whether it is the first one, how many they are, and the
        seconds since the publication."""
        queue = topology.reply_queue(job.request_id, expires_s=60)
        message = Message(encode(job), reply_to=queue.bindings[0].routing_key)
        async with AsyncExitStack() as stack:
            async with self._publishing:
                await self._bus.declare(queue)
                stack.push_async_callback(self._delete, queue.name)
                reading = self._bus.consume(queue.name, is_exclusive=True)
                deliveries = await stack.enter_async_context(reading)
                published_at = time.perf_counter()
                await self._bus.publish(topology.jobs_binding(job.model, "interactive"), message)
            is_first, num_unfinished = True, job.num_choices
            async for delivery in deliveries:
                match decode_event(delivery.message.body):
                    case Failed() as event:
                        raise RuntimeError(f"a job failed: {event.message}")
                    case (TokenDelta() | Finished()) as event:
                        yield is_first, len(event.token_ids), time.perf_counter() - published_at
                        is_first = False
                        num_unfinished -= isinstance(event, Finished)
                if not num_unfinished:
                    return

    async def _delete(self, queue: str) -> None:
        async with self._publishing:
            with suppress(BusError):  # it expires
                await self._bus.delete_queue(queue)


async def measure(
    broker: str, engine: str, name: str, loads: Sequence[Load], seconds: float, *, is_one: bool
) -> Run:
    """Run ``loads``, in their order, and count after a warm-up. ``is_one``: as one tenant."""
    model = "echo" if engine == "synthetic" else engine
    async with RabbitBus(broker) as bus:
        client = Client(bus, model)
        async with _asking(client, loads, is_one=is_one):
            client.first_token_s.clear()
            client.num_tokens.clear()
            others, start = OtherLoad(), time.perf_counter()
            await asyncio.sleep(seconds)
            times = [
                time_s for tenant in SINGLES.tenants for time_s in client.first_token_s[tenant]
            ]
            elapsed_s = time.perf_counter() - start
            run = Run(
                engine, name, elapsed_s, times, client.num_tokens.copy(), round(others.cores(), 2)
            )
    await asyncio.sleep(_WARM_UP_S)  # the worker notices that nobody reads
    return run


@asynccontextmanager
async def _asking(client: Client, loads: Sequence[Load], *, is_one: bool) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        asking = []
        for load in loads:
            for tenant in load.tenants:
                sent_as = "all" if is_one else tenant
                asking += [
                    tasks.create_task(client.keep_asking(load, tenant, sent_as))
                    for _ in range(load.num_jobs)
                ]
            await asyncio.sleep(_WARM_UP_S)
        yield
        for task in asking:
            task.cancel()


def _worker(engine: str, broker: str, log: Path) -> WarrenProcess:
    weights = ",".join(f"{name}={weight:g}" for name, weight in _WEIGHTS.items())
    variables = {"WARREN_TENANT_WEIGHTS": weights, "WARREN_MAX_NUM_SEQS": str(NUM_SLOTS)}
    if engine == "synthetic":
        return processes.echo_worker(broker, log, f"--step-ms={_STEP_MS:g}", **variables)
    options = [f"--tenant-weights={weights}", f"--max-num-seqs={NUM_SLOTS}"]
    return processes.worker(broker, log, f"--model={engine}", *options)


def measure_engine(broker: str, engine: str, seconds: float) -> list[Run]:
    """All loads, one after another, on one worker."""
    loads: list[tuple[str, list[Load], bool]] = [
        ("nine tenants alone", [SINGLES], False),
        ("and a flood of 100 jobs", [FLOOD, SINGLES], False),
        ("the same as one tenant", [FLOOD, SINGLES], True),
        ("nine and one request for 128 answers", [MANY_CHOICES, SINGLES], False),
        ("two tenants of weights 1 and 3", WEIGHTED, False),
    ]
    runs = []
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "worker"
        stack.enter_context(_worker(engine, broker, log))
        for name, parts, is_one in loads:
            notices.print(f"{engine}: {name}")
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                measuring = measure(broker, engine, name, parts, seconds, is_one=is_one)
                runs.append(runner.run(measuring))
    return runs


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures of the table; ratios are those to the runs of the same engine that they name."""
    rows = []
    for run in runs:
        same = [other for other in runs if other.engine == run.engine]
        alone, one_tenant = same[0], same[2]
        p95, p95_alone = run.ttft_ms(95), alone.ttft_ms(95)
        is_flood = run.load == same[1].load
        light, heavy = (run.num_tokens[tenant] for tenant in _WEIGHTS)
        rows.append(
            {
                "engine": run.engine,
                "load": run.load,
                "num_jobs": len(run.first_token_s),
                "ttft_p50_ms": run.ttft_ms(50),
                "ttft_p95_ms": p95,
                "ttft_max_ms": run.ttft_ms(100),
                "p95_ratio_to_alone": p95 / p95_alone if p95 and p95_alone else None,
                "tokens_per_s": run.tokens_per_s,
                "throughput_ratio_to_one_tenant": run.tokens_per_s / one_tenant.tokens_per_s
                if is_flood
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
        ("p95 to alone", "p95_ratio_to_alone", "{:.2f}x".format),
        ("tok/s", "tokens_per_s", "{:.0f}".format),
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


def draw(path: Path, runs: Sequence[Run]) -> None:
    """The distribution of the time to first token, one panel for each engine."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    figure, axes = plots.new_figure(len(engines))
    for axis, engine in zip(axes, engines, strict=True):
        for run in runs:
            if run.engine != engine or not run.first_token_s:
                continue
            times = sorted(run.first_token_s)
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
    broker: Annotated[str | None, typer.Option(help="AMQP URL; none: a node of its own.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each load.")] = 30.0,
    out: Out = RESULTS,
) -> None:
    with broker_node(broker) as node:
        runs = [run for engine in engines for run in measure_engine(node.url, engine, seconds)]
    rows = summary(runs)
    show(rows)
    loads = [asdict(load) for load in (SINGLES, FLOOD, MANY_CHOICES, *WEIGHTED)]
    about = {**describe([]), "slots": NUM_SLOTS, "step_ms": _STEP_MS, "loads": loads}
    report.write_json(out / "fairness.json", {**about, "rows": rows})
    draw(out / "fairness.svg", runs)


if __name__ == "__main__":
    typer.run(main)
