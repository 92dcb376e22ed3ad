"""The cost of the queue: time to first token, relayed tokens, open streams and memory.

    python -m bench.queue [--broker URL] [--requests N] [--seconds S]

The engine is synthetic. The time to first token is that of `bench.echo_worker`, whose engine only
sleeps, minus that of its engine alone. The rest measures a single gateway process, for which
`bench.queue_source` publishes tokens at a fixed rate.

All processes share the machine, so the CPU time of each is shown: the tokens that a gateway relays
per second of its CPU time are what it would relay with a core to itself.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench import machine, queue_latency
from bench.broker import BrokerNode, broker_node
from bench.interrupt import ends_on_sigterm
from bench.queue_load import LoadFigures, Processes, measure_load
from bench.queue_source import MODEL
from bench.report import write_json
from bench.servers import MANY_STREAMS, wait_served
from tests.support.deployment import processes
from tests.support.deployment.processes import ROOT

RESULTS = ROOT / "bench" / "results"
_RELAY = (200, 320.0)
"""Streams, and tokens/s of each: somewhat more than the goal of 60,000 tokens/s."""
_HOLD_STREAMS = 2000

_Result = TypeVar("_Result")


@contextmanager
def _token_source(broker: str, tokens_per_s: float) -> Iterator[psutil.Process]:
    args = ["-m", "bench.queue_source", f"--broker={broker}", f"--tokens-per-s={tokens_per_s}"]
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _latencies(broker: str, num_requests: int) -> dict[str, list[float]]:
    """Seconds to the first token, by the name of the measurement."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        step = f"--step-ms={queue_latency.STEP_S * 1e3}"
        stack.enter_context(processes.echo_worker(broker, logs / "worker", step))
        gateway = stack.enter_context(processes.gateway(broker, logs / "gateway"))
        return {
            "bare engine": _run(queue_latency.bare_engine(num_requests)),
            "bare broker, there and back": _run(queue_latency.bare_broker(broker, num_requests)),
            "gateway, RabbitMQ, worker": _run(queue_latency.over_http(gateway.url, num_requests)),
        }


def _load(broker: BrokerNode, num_streams: int, tokens_per_s: float, seconds: float) -> LoadFigures:
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gateway"
        source = stack.enter_context(_token_source(broker.url, tokens_per_s))
        gateway = stack.enter_context(processes.gateway(broker.url, log, *MANY_STREAMS))
        wait_served(gateway.url, MODEL)
        roles: Processes = {
            "gateway": [psutil.Process(gateway.pid)],
            "broker": [p for top in broker.processes for p in (top, *top.children(True))],
            "worker": [source],
            "client": [psutil.Process()],
        }
        measuring = measure_load(
            gateway.url, broker.url, roles, num_streams=num_streams, seconds=seconds
        )
        return _run(measuring)


def _run(main: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _show_goals(latency_ms: dict[str, float], relay: LoadFigures, hold: LoadFigures) -> None:
    engine, broker, whole = latency_ms.values()
    kib = hold.memory_bytes_per_stream / 1024
    table = Table("", "goal", "here", "bare broker", title="What the queue costs")
    for row in (
        ("added to the first token, p50", "3 ms", f"{whole - engine:.2f} ms", f"{broker:.2f} ms"),
        (f"relayed, {relay.num_streams} streams", "60000 tok/s", f"{relay.tokens_per_s:.0f}", ""),
        ("  tokens in one event", "", f"{relay.tokens_per_event:.1f}", ""),
        ("  by a gateway with its own core", "", f"{relay.tokens_per_gateway_core_s:.0f}", ""),
        (
            f"delay, {hold.num_streams} streams, p99",
            "50 ms",
            f"{hold.delay_p99_ms:.1f} ms",
            f"{hold.bare_delay_p99_ms:.1f} ms",
        ),
        ("  at tokens/s", "4000", f"{hold.tokens_per_s:.0f}", ""),
        ("  p50", "", f"{hold.delay_p50_ms:.1f} ms", f"{hold.bare_delay_p50_ms:.1f} ms"),
        ("gateway memory a stream", "50 KiB", f"{kib:.1f} KiB", ""),
    ):
        table.add_row(*row)
    Console(width=100).print(table)


def _show_costs(loads: dict[str, LoadFigures]) -> None:
    table = Table("process", title="CPU milliseconds for 1,000 tokens (for 1,000 events; cores)")
    for name in loads:
        table.add_column(name, justify="right")
    for role in ("gateway", "broker", "worker", "client"):
        cells = (
            f"{1e3 * load.cpu_s_per_1000_tokens[role]:.0f}"
            f" ({1e3 * load.cpu_s_per_1000_events[role]:.0f}; {load.cores_used[role]:.2f})"
            for load in loads.values()
        )
        table.add_row(role, *cells)
    Console(width=100).print(table)


@ends_on_sigterm
def main(
    broker: Annotated[
        str | None, typer.Option(help="AMQP URL; default: a node of its own.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests for each latency.")] = 300,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each load.")] = 15.0,
    hold_tokens_per_s: Annotated[
        float,
        typer.Option(
            help="Tokens per second of each of 2,000 streams; fewer if the broker is too slow."
        ),
    ] = 2.0,
    out: Annotated[Path, typer.Option(help="Where the JSON file goes.")] = RESULTS,
) -> None:
    with broker_node(broker) as node:
        times = _latencies(node.url, requests)
        relay = _load(node, *_RELAY, seconds)
        hold = _load(node, _HOLD_STREAMS, hold_tokens_per_s, seconds)
    latency_ms = {name: 1e3 * statistics.median(sample) for name, sample in times.items()}
    loads = {"relay": relay, "hold": hold}
    _show_goals(latency_ms, relay, hold)
    _show_costs(loads)
    figures = {name: load.as_json() for name, load in loads.items()}
    write_json(
        out / "queue.json", {**machine.describe([]), "first_token_p50_ms": latency_ms, **figures}
    )


if __name__ == "__main__":
    typer.run(main)
