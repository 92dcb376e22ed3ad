"""What the turns of conversations find in the caches of a fleet, with and without affinity
targets.

    python -m bench.affinity [--workers N] [--conversations N] [--turns N]

Users hold conversations that begin with a long text, and think between the turns. Gateway, broker
and workers are real; the engine is synthetic, with steps of a fixed duration, so a prompt takes
time by the tokens of it that are not cached. The same conversations are held four times:

- with one worker that has the slots, the cache and the step size of all together
- with jobs in one shared queue, which any worker takes
- with an affinity target for each conversation
- the same, but a worker is killed in mid-stream

All answers must be the same.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
import uvloop
from rich.table import Table

from bench.broker import broker_node
from bench.echo_worker import MODEL
from bench.figures import percentile
from bench.interrupt import ends_on_sigterm
from bench.load import LoadError
from bench.machine import describe
from bench.options import RESULTS, Out
from bench.other_load import OtherLoad
from bench.report import console, write_json
from bench.servers import wait_served
from cli.terminal import notices
from tests.support.deployment import processes
from tests.support.deployment.processes import NO_TLS, WarrenProcess
from tests.support.metrics import sample

TEXT = Path(__file__).parent / "texts" / "alice.txt"
_PROMPT_TOKENS = "warren_worker_prefix_cache_queries_total"
_ANNOUNCED = "warren_fleet_workers"
_STARTED_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The conversations, and the size of each worker."""

    num_workers: int = 8
    num_conversations: int = 64
    num_turns: int = 8
    text_chars: int = 7_000
    """The length of the first message, about 2,000 tokens."""
    answer_tokens: int = 32
    pause_s: float = 3.0
    """The mean of a user's pause between two turns."""
    step_s: float = 0.02
    step_tokens: int = 64
    """Both about as SmolLM2's on two cores: 3,200 prompt tokens per second."""
    token_s: float = 0.0
    """What each token of a step takes in addition."""
    num_slots: int = 8
    num_blocks: int = 2048
    """Blocks of 16 tokens. All workers together have room for 1.1 times all conversations."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """A fleet."""

    name: str
    num_workers: int
    size: int = 1
    """The size of a worker, relative to the plan's workers."""
    has_affinity: bool = True
    has_hedging: bool = False
    has_batch_order: bool = True
    slowdown: float = 1.0
    """How many times as long as a step of the others a step of the first worker takes."""
    is_one_killed: bool = False


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """A question and its answer."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass
class UserConversation:
    """What a user and the model have said."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[UserTurn] = field(default_factory=list)

    def ask(self, question: str, max_tokens: int) -> dict[str, Any]:
        """The body of the request with another question."""
        self.messages.append({"role": "user", "content": question})
        return {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": self.number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, kw_only=True)
class AffinityRun:
    """All conversations with one system."""

    system: FleetSetup
    conversations: Sequence[UserConversation]
    prompt_tokens: Sequence[float]
    """The prompt tokens in the jobs of each worker that is alive at the end."""
    seconds: float
    other_cores: float

    @property
    def later_turns(self) -> list[UserTurn]:
        """All but the first of each conversation."""
        return [turn for one in self.conversations for turn in one.turns[1:]]

    @property
    def hit_rate(self) -> float:
        """The part of the later turns' prompts that was in a cache."""
        later = self.later_turns
        cached = sum(turn.num_cached_tokens for turn in later)
        return cached / sum(turn.num_prompt_tokens for turn in later)

    @property
    def highest_load(self) -> float:
        """The prompt tokens of the worker with the most, relative to the mean."""
        return max(self.prompt_tokens) / statistics.mean(self.prompt_tokens)

    def ttft_ms(self, percent: float) -> float:
        """A percentile over the later turns."""
        return 1e3 * percentile([turn.ttft_s for turn in self.later_turns], percent)


class Fleet:
    """The processes of a system."""

    def __init__(self, broker: str, plan: FleetPlan, system: FleetSetup, stack: ExitStack) -> None:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="warren-affinity-")))
        options = ("--log-level=warning", "--max-requests=4096", f"--data-dir={logs / 'data'}")
        tuning = {
            "has_affinity": system.has_affinity,
            "has_hedging": system.has_hedging,
            "has_batch_order": system.has_batch_order,
        }
        self.gateway = stack.enter_context(
            processes.gateway(broker, logs / "gateway", *options, tuning=tuning)
        )
        size = system.size
        variables = {
            "WARREN_LOG_LEVEL": "warning",
            "WARREN_MAX_NUM_SEQS": str(size * plan.num_slots),
            "WARREN_MAX_NUM_BATCHED_TOKENS": str(size * plan.step_tokens),
        }
        worker_options = (
            f"--num-blocks={size * plan.num_blocks}",
            f"--token-ms={1e3 * plan.token_s}",
        )
        steps_ms = [1e3 * plan.step_s * system.slowdown, *[1e3 * plan.step_s] * system.num_workers]
        self.workers = [
            processes.echo_worker(
                broker,
                logs / f"worker-{k}",
                f"--step-ms={steps_ms[k]}",
                *worker_options,
                **variables,
            )
            for k in range(system.num_workers)
        ]
        for first in range(0, system.num_workers, _STARTED_AT_ONCE):
            group = self.workers[first : first + _STARTED_AT_ONCE]
            for worker in group:
                worker.start()
                stack.callback(_end, worker)
            for worker in group:
                worker.wait_healthy()
        wait_served(self.gateway.url, MODEL)
        while sample(self.gateway, _ANNOUNCED) < system.num_workers:
            time.sleep(0.1)

    def kill_one(self) -> None:
        self.workers.pop().kill()


async def hold(fleet: Fleet, plan: FleetPlan, conversation: UserConversation, text: str) -> None:
    """Hold a conversation. Raises `LoadError` if an answer is cut off or fails."""
    draw = random.Random(conversation.number)
    limits = httpx.Limits(max_keepalive_connections=0)  # the gateway closes idle ones
    async with httpx.AsyncClient(
        base_url=fleet.gateway.url, timeout=300, verify=NO_TLS, limits=limits
    ) as http:
        question = f"Text {conversation.number}: {text} What is it about?"
        for number in range(plan.num_turns):
            await asyncio.sleep(draw.expovariate(1 / plan.pause_s))
            body = conversation.ask(question, plan.answer_tokens)
            await ask(http, conversation, body)
            question = f"{number + 2}. And what happens after that? Please say a little more."


async def ask(
    http: httpx.AsyncClient, conversation: UserConversation, body: dict[str, Any]
) -> None:
    """Stream the answer to a question. Raises `LoadError` if it is cut off or fails."""
    sent_at, first_at, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise LoadError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            delta = "".join(one["delta"].get("content") or "" for one in chunk.get("choices", ()))
            if delta and not text:
                first_at = time.perf_counter()
            text += delta
    if usage.get("completion_tokens") != body["max_tokens"] or not first_at:
        raise LoadError(f"an answer was cut off: {usage}")
    conversation.messages.append({"role": "assistant", "content": text})
    turn = UserTurn(
        ttft_s=first_at - sent_at,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )
    conversation.turns.append(turn)


async def measure(broker: str, plan: FleetPlan, system: FleetSetup, text: str) -> AffinityRun:
    """Hold all conversations at the same time."""
    conversations = [UserConversation(k) for k in range(plan.num_conversations)]
    with ExitStack() as stack:
        fleet = await asyncio.to_thread(Fleet, broker, plan, system, stack)
        others, start = OtherLoad(), time.perf_counter()
        async with asyncio.TaskGroup() as users:
            if system.is_one_killed:
                users.create_task(_kill_one(fleet, plan, conversations))
            for one in conversations:
                users.create_task(hold(fleet, plan, one, text))
        seconds, other_cores = time.perf_counter() - start, others.cores()
        loads = [await asyncio.to_thread(sample, one, _PROMPT_TOKENS) for one in fleet.workers]
    return AffinityRun(
        system=system,
        conversations=conversations,
        prompt_tokens=loads,
        seconds=seconds,
        other_cores=other_cores,
    )


async def _kill_one(
    fleet: Fleet, plan: FleetPlan, conversations: Sequence[UserConversation]
) -> None:
    """Kill a worker once half of all turns are over."""
    half = plan.num_conversations * plan.num_turns / 2
    while sum(len(one.turns) for one in conversations) < half:  # noqa: ASYNC110 (in processes)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(fleet.kill_one)


def _end(worker: WarrenProcess) -> None:
    if worker.is_alive:
        worker.kill()


def check(runs: Sequence[AffinityRun]) -> None:
    """Raises `LoadError` if two systems gave different answers."""
    first, *others = ([one.messages for one in run.conversations] for run in runs)
    for run, said in zip(runs[1:], others, strict=True):
        if said != first:
            raise LoadError(f"{run.system.name}: answers differ from those of one worker")


def summary(runs: Sequence[AffinityRun]) -> list[dict[str, Any]]:
    """The figures of the table. The first run is with one large worker, the second with the shared
    queue."""
    whole, shared, *_ = runs
    return [
        {
            "system": run.system.name,
            "hit_rate": run.hit_rate,
            "hits_ratio_to_one_worker": run.hit_rate / whole.hit_rate,
            "ttft_p50_ms": run.ttft_ms(50),
            "ttft_p95_ms": run.ttft_ms(95),
            "ttft_p50_ratio_to_shared": run.ttft_ms(50) / shared.ttft_ms(50),
            "highest_load": run.highest_load,
            "seconds": run.seconds,
            "other_cores": run.other_cores,
        }
        for run in runs
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = [
        ("cached", "hit_rate", "{:.1%}"),
        ("to one worker", "hits_ratio_to_one_worker", "{:.2f}x"),
        ("TTFT ms: p50", "ttft_p50_ms", "{:.0f}"),
        ("p95", "ttft_p95_ms", "{:.0f}"),
        ("p50 to shared", "ttft_p50_ratio_to_shared", "{:.2f}x"),
        ("highest load", "highest_load", "{:.2f}x"),
        ("others", "other_cores", "{:.1f}"),
    ]
    table = Table("system", title="Turns after the first")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["system"], *(form.format(row[key]) for _, key, form in columns))
    console().print(table)


@ends_on_sigterm
def main(
    workers: Annotated[int, typer.Option(min=2)] = FleetPlan.num_workers,
    conversations: Annotated[int, typer.Option(min=1)] = FleetPlan.num_conversations,
    turns: Annotated[
        int, typer.Option(min=2, help="Turns of each conversation.")
    ] = FleetPlan.num_turns,
    pause_s: Annotated[
        float, typer.Option(help="The mean of a user's pause between two turns.")
    ] = FleetPlan.pause_s,
    broker: Annotated[
        str | None, typer.Option(help="AMQP URL; default: a node of its own.")
    ] = None,
    out: Out = RESULTS,
) -> None:
    plan = FleetPlan(
        num_workers=workers, num_conversations=conversations, num_turns=turns, pause_s=pause_s
    )
    text = TEXT.read_text(encoding="utf-8")[: plan.text_chars]
    systems = [
        FleetSetup(name="one worker as large as all", num_workers=1, size=workers),
        FleetSetup(name="shared queue", num_workers=workers, has_affinity=False),
        FleetSetup(name="affinity targets", num_workers=workers),
        FleetSetup(name="affinity targets, one killed", num_workers=workers, is_one_killed=True),
    ]
    runs = []
    with broker_node(broker) as node:
        for system in systems:
            notices.print(system.name)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runs.append(runner.run(measure(node.url, plan, system, text)))
    check(runs)
    rows = summary(runs)
    show(rows)
    content = {"plan": asdict(plan), "rows": rows}
    write_json(out / "affinity.json", {**describe([]), **content})


if __name__ == "__main__":
    typer.run(main)
