"""What the queue costs: time to first token through gateway, broker and worker, less the engine's.

    python -m bench.queue [--broker URL] [--requests N]

The engine is synthetic and only waits, so that what remains is the way there and back. The client
is a bare socket, because an HTTP library would cost as much as what is measured.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from bench.echo_worker import MODEL, echo_model
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.messages import SamplingParams
from shared.settings import WorkerSettings
from tests.support import processes
from tests.support.broker import running_node
from worker.engine.interface import SequenceId, Submit
from worker.generation import Generations

PROMPT_IDS = list(range(100, 228))
WARM_UP = 20
STEP_S = 0.005
"""A step of a small model: the first token takes one."""
PAUSE_S = 0.02
"""Between an answer and the next request: cleaning up after an answer is not part of the next."""

Measure = Callable[[int], Awaitable[float]]


async def _sample(measure: Measure, num_requests: int) -> list[float]:
    """Times in seconds of requests one after another, the first few left out."""
    times = []
    for k in range(WARM_UP + num_requests):
        times.append(await measure(k))
        await asyncio.sleep(PAUSE_S)
    return times[WARM_UP:]


async def _bare_engine(num_requests: int) -> list[float]:
    model = echo_model(settings.load(WorkerSettings), STEP_S)
    async with Generations(model.engine) as generations:

        async def measure(k: int) -> float:
            submit = Submit(
                sequence_id=SequenceId(f"bench-{k}", 0),
                prompt_ids=PROMPT_IDS,
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                max_tokens=4,
            )
            start = time.perf_counter()
            async with generations.open([submit]) as generation:
                await anext(generation)
                return time.perf_counter() - start

        return await _sample(measure, num_requests)


async def _bare_broker(url: str, num_requests: int) -> list[float]:
    """One message to a job queue and one to a reply queue: no way over a broker is shorter."""
    jobs = topology.jobs_queue("bare", "interactive")
    replies = topology.reply_queue("bare", expires_s=60)
    async with RabbitBus(url) as bus:
        await bus.declare(jobs, replies)
        async with bus.consume(jobs.name) as taken, bus.consume(replies.name) as answered:

            async def measure(_: int) -> float:
                start = time.perf_counter()
                await bus.publish(jobs.bindings[0], Message(bytes(800)))
                await (await anext(taken)).ack()
                await bus.publish(replies.bindings[0], Message(bytes(100)))
                await (await anext(answered)).ack()
                return time.perf_counter() - start

            return await _sample(measure, num_requests)


async def _http(url: str, num_requests: int) -> list[float]:
    address = urlsplit(url)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT_IDS,
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = (head + body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def measure(_: int) -> float:
        start = time.perf_counter()
        writer.write(request)
        await reader.readuntil(b'"text":')
        first_token = time.perf_counter() - start
        await reader.readuntil(b"0\r\n\r\n")
        return first_token

    times = await _sample(measure, num_requests)
    writer.close()
    return times


def _show(rows: dict[str, list[float]]) -> None:
    table = Table("path", "p50 ms", "p99 ms", title="Time to first token")
    for name, times in rows.items():
        p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[-1]
        table.add_row(name, f"{p50 * 1e3:.2f}", f"{p99 * 1e3:.2f}")
    Console().print(table)
    engine, broker, whole = (statistics.median(times) for times in rows.values())
    added = whole - engine
    Console().print(f"added: {added * 1e3:.2f} ms, {added / broker:.1f} x the bare broker")


def main(
    broker: Annotated[str | None, typer.Option(help="AMQP URL; none: a node of its own.")] = None,
    requests: Annotated[int, typer.Option(help="Requests for each row.")] = 300,
) -> None:
    rows = {"bare engine": asyncio.run(_bare_engine(requests))}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = broker or stack.enter_context(running_node()).url
        stack.enter_context(
            processes.echo_worker(url, logs / "worker", f"--step-ms={STEP_S * 1e3}")
        )
        gateway = stack.enter_context(processes.gateway(url, logs / "gateway"))
        rows["bare broker, there and back"] = asyncio.run(_bare_broker(url, requests))
        rows["gateway, RabbitMQ, worker"] = asyncio.run(_http(gateway.url, requests))
    _show(rows)


if __name__ == "__main__":
    typer.run(main)
