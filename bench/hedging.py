"""The time to the first token of a fleet with a slow worker, with and without hedging.

    python -m bench.hedging [--workers N] [--requests N] [--per-second N]

Gateway, broker and workers are real; the engine is synthetic, with steps of a fixed duration.
Streamed requests arrive at random. The same requests are sent to a fleet of equal workers, and to a
fleet in which a step of a single worker takes ten times as long, with and without hedging. The
first requests, from which the gateway learns what to expect, do not count. Every stream must say
the same in all systems.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import typer
import uvloop
from rich.table import Table

from bench.affinity import TEXT, Fleet, FleetPlan, FleetSetup, UserConversation, ask
from bench.broker import broker_node
from bench.figures import percentile
from bench.interrupt import ends_on_sigterm
from bench.load import LoadError
from bench.machine import describe
from bench.options import RESULTS, Out
from bench.other_load import OtherLoad
from bench.report import console, write_json
from cli.terminal import notices
from gateway.log.hedging import OUTCOMES, Outcome
from tests.support.deployment.processes import NO_TLS
from tests.support.metrics import sample

_HEDGES = "warren_gateway_hedges_total"
_COMPUTED = ("warren_worker_prompt_tokens_total", "warren_worker_generation_tokens_total")


@dataclass(frozen=True, kw_only=True)
class HedgingPlan:
    """The requests, and the size of each worker."""

    num_requests: int = 320
    num_first: int = 100
    """The requests at the beginning that do not count."""
    per_second: float = 8.0
    prompt_chars: int = 1_000
    """About 240 tokens, less than what gives a prompt an affinity target."""
    answer_tokens: int = 16
    num_workers: int = 4
    slowdown: float = 10.0
    step_s: float = 0.02
    step_tokens: int = 64


@dataclass(frozen=True, kw_only=True)
class HedgingRun:
    """All requests with one system."""

    system: FleetSetup
    answers: Sequence[str]
    ttfts_s: Sequence[float]
    """Of the requests that count."""
    hedges: Mapping[Outcome, float]
    """By outcome, of all requests."""
    num_tokens: int
    """Tokens of all prompts and answers."""
    num_computed: float
    """Tokens that the workers have computed. A prompt counts as soon as a worker begins its job, so
    this is a little too high."""
    other_cores: float

    @property
    def computed_twice(self) -> float:
        """The extra work, as a share of the work that was asked for."""
        return self.num_computed / self.num_tokens - 1


def prompt(number: int, text: str, num_chars: int) -> str:
    """A part of ``text`` that begins like no other, so that no cache has it."""
    start = random.Random(number).randrange(len(text) - num_chars)
    return f"{number}. {text[start : start + num_chars]}"


async def measure(broker: str, plan: HedgingPlan, system: FleetSetup, text: str) -> HedgingRun:
    """Send all requests."""
    sizes = FleetPlan(step_s=plan.step_s, step_tokens=plan.step_tokens)
    draw = random.Random(0)
    conversations = [UserConversation(k) for k in range(plan.num_requests)]
    with ExitStack() as stack:
        fleet = await asyncio.to_thread(Fleet, broker, sizes, system, stack)
        others = OtherLoad()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(
                base_url=fleet.gateway.url, timeout=300, verify=NO_TLS, limits=limits
            ) as http,
            asyncio.TaskGroup() as users,
        ):
            due_at = time.perf_counter()
            for conversation in conversations:
                due_at += draw.expovariate(plan.per_second)
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                question = prompt(conversation.number, text, plan.prompt_chars)
                body = conversation.ask(question, plan.answer_tokens)
                users.create_task(ask(http, conversation, body))
        hedges = {
            outcome: await asyncio.to_thread(sample, fleet.gateway, _HEDGES, outcome=outcome)
            for outcome in OUTCOMES
        }
        num_computed = [
            await asyncio.to_thread(sample, worker, name)
            for worker in fleet.workers
            for name in _COMPUTED
        ]
        other_cores = others.cores()
    prompts = [turn.num_prompt_tokens for one in conversations for turn in one.turns]
    return HedgingRun(
        system=system,
        answers=[one.messages[-1]["content"] for one in conversations],
        ttfts_s=[turn.ttft_s for one in conversations[plan.num_first :] for turn in one.turns],
        hedges=hedges,
        num_tokens=sum(prompts) + len(prompts) * plan.answer_tokens,
        num_computed=sum(num_computed),
        other_cores=other_cores,
    )


def check(runs: Sequence[HedgingRun]) -> None:
    """Raises `LoadError` if two systems gave different answers."""
    first, *others = runs
    for run in others:
        if run.answers != first.answers:
            raise LoadError(f"{run.system.name}: answers differ from those of {first.system.name}")


def summary(runs: Sequence[HedgingRun]) -> list[dict[str, Any]]:
    """The figures of the table. The first run is without a slow worker and without hedging."""
    first_p99_ms = _ttft_ms(runs[0], 99)
    return [
        {
            "system": run.system.name,
            "ttft_p50_ms": _ttft_ms(run, 50),
            "ttft_p95_ms": _ttft_ms(run, 95),
            "ttft_p99_ms": _ttft_ms(run, 99),
            "p99_ratio": _ttft_ms(run, 99) / first_p99_ms,
            **{f"hedges_{outcome}": num / len(run.answers) for outcome, num in run.hedges.items()},
            "computed_twice": run.computed_twice,
            "other_cores": run.other_cores,
        }
        for run in runs
    ]


def _ttft_ms(run: HedgingRun, percent: float) -> float:
    return 1e3 * percentile(list(run.ttfts_s), percent)


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = [
        ("TTFT ms: p50", "ttft_p50_ms", "{:.0f}"),
        ("p95", "ttft_p95_ms", "{:.0f}"),
        ("p99", "ttft_p99_ms", "{:.0f}"),
        ("p99 ratio", "p99_ratio", "{:.2f}x"),
        *((f"hedges {outcome}", f"hedges_{outcome}", "{:.1%}") for outcome in OUTCOMES),
        ("computed twice", "computed_twice", "{:.1%}"),
        ("others", "other_cores", "{:.1f}"),
    ]
    table = Table("system", title="Streams of a fleet")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["system"], *(form.format(row[key]) for _, key, form in columns))
    console().print(table)


def _measured(url: str, plan: HedgingPlan, system: FleetSetup, text: str) -> HedgingRun:
    notices.print(system.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(url, plan, system, text))


@ends_on_sigterm
def main(
    workers: Annotated[int, typer.Option(min=2)] = HedgingPlan.num_workers,
    requests: Annotated[int, typer.Option(min=2)] = HedgingPlan.num_requests,
    first: Annotated[
        int, typer.Option(min=0, help="Requests that do not count.")
    ] = HedgingPlan.num_first,
    per_second: Annotated[float, typer.Option(help="Of the requests.")] = HedgingPlan.per_second,
    broker: Annotated[
        str | None, typer.Option(help="AMQP URL; default: a node of its own.")
    ] = None,
    out: Out = RESULTS,
) -> None:
    plan = HedgingPlan(
        num_workers=workers, num_requests=requests, num_first=first, per_second=per_second
    )
    slow, text = plan.slowdown, TEXT.read_text(encoding="utf-8")
    systems = [
        FleetSetup(name="equal workers", num_workers=workers),
        FleetSetup(name="equal workers, hedging", num_workers=workers, has_hedging=True),
        FleetSetup(name="one slow worker", num_workers=workers, slowdown=slow),
        FleetSetup(
            name="one slow worker, hedging", num_workers=workers, slowdown=slow, has_hedging=True
        ),
    ]
    with broker_node(broker) as node:
        runs = [_measured(node.url, plan, system, text) for system in systems]
    check(runs)
    rows = summary(runs)
    show(rows)
    write_json(out / "hedging.json", {**describe([]), "plan": asdict(plan), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
