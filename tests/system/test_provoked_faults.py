"""A deployment with a broker that causes every possible fault, and whose logs are deleted."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import WarrenProcess
from tests.support.network.amqp.provocations import GATEWAYS_RATE, WORKERS_RATE, Provocations
from tests.support.network.amqp.proxy import AmqpProxy
from tests.system.chaos import ground
from tests.system.chaos.callers import Question
from tests.system.chaos.campaign import Campaign, answers, patient_client
from tests.system.chaos.deployment import SHORT_GRACE, Deployment
from tests.system.soak.traces import logged

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

QUESTIONS = [Question("echo", f"Question {k}", 40 + 10 * (k % 3), seed=k) for k in range(12)]
VICTIMS_QUESTION = Question("echo", "A victim", 200, seed=1)
NUM_CALLERS = 5
NUM_VICTIMS_AT_ONCE = 2
NUM_OF_WORKER, NUM_OF_GATEWAY = 12, 4
"""The faults that either side suffers at least, in about 10 s."""
ENDS_WITHIN_S = 200.0
PAUSE_S = 0.1

Harm = Callable[[str], Awaitable[None]]
"""What is done to the log with that name."""


def echo_worker(broker: str, log: Path) -> WarrenProcess:
    return processes.echo_worker(broker, log, "--step-ms=10", WARREN_LOG_LEVEL="warning")


@asynccontextmanager
async def proxied_deployment(
    node: RabbitNode, logs: Path, workers: Provocations, gateways: Provocations
) -> AsyncIterator[Deployment]:
    async with (
        AmqpProxy(node.url_of("worker"), workers) as workers_proxy,
        AmqpProxy(node.url_of("gateway"), gateways) as gateways_proxy,
        Deployment(
            logs,
            worker_url=workers_proxy.url,
            gateway_url=gateways_proxy.url,
            start_worker=echo_worker,
            num_workers=1,
            num_gateways=1,
            gateway_options=[SHORT_GRACE],
        ) as deployment,
    ):
        yield deployment


class Victims:
    """Streams whose logs are disturbed; each has to end, with or without an error."""

    def __init__(self, urls: Sequence[str], harms: Sequence[Harm]) -> None:
        self.ends: Counter[str] = Counter()
        """What the streams ended with: ``[DONE]``, or the code of their error."""
        self._urls = urls
        self._harms = harms

    async def run(self, is_enough: Callable[[], bool]) -> None:
        """Run victims in sequence, a few at once, each with another disturbance, until a stream
        has ended well and ``is_enough``."""
        async with patient_client() as client, asyncio.TaskGroup() as several:
            for number in range(NUM_VICTIMS_AT_ONCE):
                several.create_task(self._come(client, number, is_enough))

    async def _come(
        self, client: httpx.AsyncClient, number: int, is_enough: Callable[[], bool]
    ) -> None:
        while not (self.ends["[DONE]"] and is_enough()):
            harm = self._harms[number % len(self._harms)]
            number += 1
            try:
                async with asyncio.timeout(ENDS_WITHIN_S):
                    self.ends[await self._suffer(client, harm)] += 1
            except TimeoutError:
                self.ends[f"hangs after {harm.__name__}"] += 1

    async def _suffer(self, client: httpx.AsyncClient, harm: Harm) -> str:
        """Read a stream whose log is disturbed after a few events; returns how it ended."""
        url = f"{self._urls[0]}/v1/completions"
        last, num_events = "nothing", 0
        async with client.stream("POST", url, json=VICTIMS_QUESTION.body) as response:
            if response.status_code != 200:
                await asyncio.sleep(PAUSE_S)
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                num_events += line.startswith("data: ")
                last = line.removeprefix("data: ") if line else last
                if num_events == 5:
                    await harm(topology.reply_key(response.headers["x-request-id"]))
        return last if last == "[DONE]" else code_of(last)


def code_of(event: str) -> str:
    """The error code of an event; None if there is no last event."""
    error = json.loads(event).get("error")
    return "no end" if error is None else str(error["code"])


async def test_provoked_faults_take_no_stream_with_them(
    own_broker: RabbitNode, tmp_path: Path
) -> None:
    of_worker, of_gateway = Provocations(1, rate=0), Provocations(2, rate=0)
    async with (
        proxied_deployment(own_broker, tmp_path, of_worker, of_gateway) as deployment,
        RabbitBus(own_broker.url) as operator,
    ):
        expected = await answers(deployment, QUESTIONS)

        async def refuse_next(log: str) -> None:
            of_worker.refuse_next(log)

        def is_enough() -> bool:
            num_of_worker, num_of_gateway = of_worker.num_of.total(), of_gateway.num_of.total()
            return num_of_worker >= NUM_OF_WORKER and num_of_gateway >= NUM_OF_GATEWAY

        victims = Victims(deployment.urls(), [operator.delete_queue, refuse_next])
        of_worker.rate, of_gateway.rate = WORKERS_RATE, GATEWAYS_RATE
        campaign = Campaign(deployment, expected, NUM_CALLERS)
        row = await campaign.under("provoked", partial(victims.run, is_enough), 1)
        of_worker.rate = of_gateway.rate = 0
        await asyncio.to_thread(ground.wait_clean, own_broker, deployment, {})
        are_alive = [process.is_alive for process in deployment.processes]
        codes = [await asyncio.to_thread(process.terminate) for process in deployment.processes]

    assert row.tally.errors == []
    assert row.tally.num_streams > NUM_CALLERS
    assert not victims.ends["internal_error"]
    assert [end for end in victims.ends if end == "no end" or end.startswith("hangs")] == []
    assert (are_alive, codes) == ([True, True], [0, 0])
    assert [line for one in deployment.processes for line in logged(one.log).errors] == []
