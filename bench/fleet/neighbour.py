"""The delay of other traffic at the broker of a fleet: alone, beside an idle fleet, and beside its
streams.

The other traffic belongs to a project with a virtual host of its own: persistent messages of 1 KB
at a fixed rate, each confirmed, to a durable queue whose consumer acknowledges each message. A
separate process, which runs this module, sends and reads the messages. The delay of a message that
is sent late, because earlier messages are not confirmed yet, counts from when it was due.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
import uvloop
from yarl import URL

from bench.figures import percentile
from bench.fleet.deployment import Deployment, Meter, deployed
from bench.fleet.point import NOTHING
from bench.fleet.users import FleetUsers, Received, users
from cli.terminal import notices
from shared.bus.base import Binding, Exchange, Message, Queue
from shared.bus.rabbit import RabbitBus
from tests.support.deployment.processes import ROOT

_VHOST = "neighbour"
_BODY_BYTES = 1024
_SETTLE_S = 3.0
_LATE_S = 10.0
"""Seconds for which the last messages are waited for."""
_WORK = Binding(Exchange("work", "direct"), "work")
_QUEUE = Queue("work", (_WORK,))
_NUM_WORKERS = 2
_NUM_SLOTS = 32
_STEP_S = 0.1
_ANSWER_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The other traffic beside a load of the fleet."""

    load: str
    num_users: int
    """The users of the fleet. Each sends a request as soon as the last answer ends."""
    received: Received
    """What these users received."""
    delay_p50_ms: float
    """From when a message was due until its consumer had it."""
    delay_p99_ms: float
    broker_cores: float
    others: float
    """Cores that processes outside of the benchmark used."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """The other traffic beside the loads, in the order in which they were measured."""

    messages_per_s: int
    seconds: float
    loads: Sequence[Beside]


async def measure_neighbour(
    messages_per_s: int, num_users: Sequence[int], seconds: float
) -> Neighbour:
    """Measure ``messages_per_s`` of other traffic alone, beside a fleet without users, and beside
    each of ``num_users``. Raises `RuntimeError` if a message is lost."""
    with deployed(num_nodes=1, num_gateways=0) as deployment:
        url = await asyncio.to_thread(_add_vhost, deployment)

        async def beside(load: str, users_of_fleet: int = 0) -> Beside:
            measuring = _beside(deployment, url, load, users_of_fleet, messages_per_s, seconds)
            return await measuring

        loads = [await beside("alone")]
        await asyncio.to_thread(_add_fleet, deployment)
        loads.append(await beside("an idle fleet"))
        loads += [await beside(f"{number} users", number) for number in num_users]
    return Neighbour(messages_per_s=messages_per_s, seconds=seconds, loads=loads)


def _add_vhost(deployment: Deployment) -> str:
    """Add the virtual host of the other traffic; returns its URL."""
    (node,) = deployment.nodes
    url = URL(node.url)
    node.ctl("add_vhost", _VHOST)
    node.ctl("set_permissions", "--vhost", _VHOST, url.user or "", ".*", ".*", ".*")
    return str(url.with_path(f"/{_VHOST}"))


def _add_fleet(deployment: Deployment) -> None:
    deployment.add_gateways(1)
    deployment.add_workers(_NUM_WORKERS, step_s=_STEP_S, num_slots=_NUM_SLOTS)


async def _beside(
    deployment: Deployment,
    url: str,
    load: str,
    num_users: int,
    messages_per_s: int,
    seconds: float,
) -> Beside:
    async with users(deployment.urls, _ANSWER_TOKENS) as of_fleet:
        await _fill(of_fleet, num_users)
        traffic = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.fleet.neighbour", f"--broker={url}"),
            *(f"--messages-per-s={messages_per_s}", f"--seconds={seconds}"),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert traffic.stdout is not None
        await traffic.stdout.readline()  # it is about to measure
        meter = Meter(deployment)
        received = NOTHING
        if num_users:
            received = await of_fleet.measure(seconds)
        else:
            await asyncio.sleep(seconds)
        used = meter.read()
        said = await traffic.stdout.readline()
        if await traffic.wait():
            raise RuntimeError("the other traffic lost messages")
    delays = json.loads(said)
    notices.print(f"  beside {load}: p99 {delays['p99_ms']:.1f} ms")
    return Beside(
        load=load,
        num_users=num_users,
        received=received,
        delay_p50_ms=delays["p50_ms"],
        delay_p99_ms=delays["p99_ms"],
        broker_cores=used.cores["broker"],
        others=used.others,
    )


async def _fill(load: FleetUsers, num_users: int) -> None:
    """Let users come at intervals, so that their answers do not end at once."""
    answer_s = (_ANSWER_TOKENS + 2) * _STEP_S
    for _ in range(num_users):
        load.add(1)
        await asyncio.sleep(answer_s / num_users)


class _Traffic:
    """Messages at a fixed rate, and their delays."""

    def __init__(self, bus: RabbitBus, messages_per_s: int) -> None:
        self._bus = bus
        self._pause_s = 1 / messages_per_s
        self._delays_s: list[float] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def delays_s(self, seconds: float) -> list[float]:
        """The delays of the messages of the next ``seconds``. Raises `TimeoutError` if a message
        does not arrive."""
        self._delays_s, num_messages = [], round(seconds / self._pause_s)
        begin_at = time.monotonic()
        for number in range(num_messages):
            due_at = begin_at + number * self._pause_s
            await asyncio.sleep(due_at - time.monotonic())
            body = f"{due_at:.6f}".ljust(_BODY_BYTES).encode()
            task = asyncio.create_task(self._bus.publish(_WORK, Message(body)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        async with asyncio.timeout(_LATE_S):
            while len(self._delays_s) < num_messages:  # noqa: ASYNC110 (the reader tells nobody)
                await asyncio.sleep(0.01)
        return self._delays_s

    async def read(self) -> None:
        """Read and acknowledge messages until cancelled."""
        async with self._bus.consume(_QUEUE.name, prefetch=100) as deliveries:
            async for delivery in deliveries:
                self._delays_s.append(time.monotonic() - float(delivery.message.body))
                await delivery.ack()


async def _run(broker: str, messages_per_s: int, seconds: float) -> list[float]:
    async with RabbitBus(broker) as bus:
        await bus.declare(_QUEUE)
        traffic = _Traffic(bus, messages_per_s)
        reading = asyncio.create_task(traffic.read())
        await traffic.delays_s(_SETTLE_S)
        print(flush=True)
        delays_s = await traffic.delays_s(seconds)
        reading.cancel()
        return delays_s


def main(
    broker: Annotated[str, typer.Option(help="AMQP URL.")],
    messages_per_s: Annotated[int, typer.Option(help="Messages per second.")],
    seconds: Annotated[float, typer.Option(help="Seconds to measure.")],
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        delays_s = runner.run(_run(broker, messages_per_s, seconds))
    p50_ms, p99_ms = (1e3 * percentile(delays_s, percent) for percent in (50, 99))
    print(json.dumps({"p50_ms": p50_ms, "p99_ms": p99_ms}))


if __name__ == "__main__":
    typer.run(main)
