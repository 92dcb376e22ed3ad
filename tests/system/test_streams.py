"""Gateways that are killed or replaced during their streams, with real processes and a real
broker."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus
from tests.support import PATIENCE_S
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess
from tests.support.gateway.http import SECRET, chat_body, events, eventually
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

pytestmark = pytest.mark.rabbit

CHAT = "/v1/chat/completions"
NUM_STREAMS = 16
TUNING = {"worker_silence_s": 600.0}
"""The worker is in the test's own process. However late it is, its jobs are not published again."""
WORDS = [f"w{number} " for number in range(60)]
WHOLE = "".join(WORDS) + "end"


class Speaker:
    """A script that sends `WORDS`, the last word only when it may end."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        """Set once the broker has a token."""
        self.may_end = asyncio.Event()

    async def __call__(self, job: ScriptedJob) -> None:
        await job.start()
        for word in WORDS[:-1]:
            await job.say(word)
            self.has_begun.set()
            await asyncio.sleep(0.02)
        await self.may_end.wait()
        await job.say(WORDS[-1])
        await job.finish("end")


@pytest.fixture
def gateways(broker: Broker, tmp_path: Path) -> Iterator[list[WarrenProcess]]:
    """Two gateways of a deployment, with the permissions that they have in production."""
    options = (f"--secret={SECRET}", "--drain-grace-s=0.3", "--disconnect-grace-s=0.5")
    with ExitStack() as stack:
        pair = [
            processes.gateway(
                broker.url_of("gateway"), tmp_path / f"gateway{k}", *options, tuning=TUNING
            )
            for k in range(2)
        ]
        for gateway in pair:
            gateway.start()
            stack.callback(gateway.terminate)
        for gateway in pair:
            gateway.wait_healthy()
        yield pair


@pytest.fixture
async def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
async def worker(broker: Broker, speaker: Speaker) -> AsyncIterator[ScriptedWorker]:
    async with RabbitBus(broker.url_of("worker")) as bus, ScriptedWorker(bus, speaker) as worker:
        yield worker
        await worker.wait_settled()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield http


class Client:
    """Reads a stream to its end, from any live gateway."""

    def __init__(self, http: httpx.AsyncClient, urls: list[str]) -> None:
        self._http = http
        self._urls = urls
        self._body = ""
        self.request_id = ""
        self.num_returns = 0

    @property
    def text(self) -> str:
        chunks = [chunk for chunk in events(self._body) if "choices" in chunk]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    @property
    def can_return(self) -> bool:
        """Whether it has received a whole event with an id."""
        return "\n\n" in self._body.partition("id: ")[2]

    @property
    def is_ended(self) -> bool:
        return self._body.endswith("data: [DONE]\n\n")

    async def run(self) -> None:
        body = chat_body(stream=True)
        headers = {"accept": "text/event-stream"}
        await self._read("POST", f"{self._urls[0]}{CHAT}", json=body, headers=headers)
        while not self.is_ended:
            self.num_returns += 1
            url = self._urls[self.num_returns % len(self._urls)]
            last_id = re.findall(r"^id: (\S+)$", self._body, re.MULTILINE)[-1]
            headers = {"last-event-id": last_id}
            await self._read("GET", f"{url}/v1/streams/{self.request_id}", headers=headers)

    async def _read(self, method: str, url: str, **request: object) -> None:
        try:
            async with self._http.stream(method, url, **request) as response:  # type: ignore[arg-type]
                assert response.status_code == 200, (url, response.status_code)
                self.request_id = self.request_id or response.headers["x-request-id"]
                async for piece in response.aiter_text():
                    self._body += piece
        except httpx.TransportError:
            await asyncio.sleep(0.05)
        # An incomplete event does not count.
        self._body = self._body[: self._body.rfind("\n\n") + 2]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_of_a_gateway_that_ends_go_on_at_another_one_without_a_gap(
    gateways: list[WarrenProcess],
    worker: ScriptedWorker,
    speaker: Speaker,
    http: httpx.AsyncClient,
    signum: signal.Signals,
) -> None:
    clients = [Client(http, [gateway.url for gateway in gateways]) for _ in range(NUM_STREAMS)]
    running = [asyncio.create_task(client.run()) for client in clients]

    async def can_return() -> bool:
        return all(client.can_return for client in clients)

    await worker.wait_until(lambda: worker.num_running == NUM_STREAMS)
    await eventually(can_return)

    if signum == signal.SIGKILL:
        gateways[0].kill()
    else:
        assert await asyncio.to_thread(gateways[0].terminate) == 0
    speaker.may_end.set()
    await asyncio.gather(*running)

    assert {client.text for client in clients} == {WHOLE}
    assert min(client.num_returns for client in clients) > 0
    assert len(worker.jobs) == NUM_STREAMS
    assert worker.commands == []


async def test_a_whole_answer_survives_its_gateway_with_a_key(
    gateways: list[WarrenProcess],
    worker: ScriptedWorker,
    speaker: Speaker,
    http: httpx.AsyncClient,
) -> None:
    async def ask(gateway: WarrenProcess) -> httpx.Response:
        headers = {"idempotency-key": "k"}
        return await http.post(f"{gateway.url}{CHAT}", json=chat_body(), headers=headers)

    first = asyncio.create_task(ask(gateways[0]))
    await speaker.has_begun.wait()
    gateways[0].kill()
    with pytest.raises(httpx.TransportError):
        await first
    speaker.may_end.set()

    answers = [await ask(gateways[1]) for _ in range(2)]

    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].json()["choices"][0]["message"]["content"] == WHOLE
    assert len(worker.jobs) == 1


async def test_a_live_reader_elsewhere_lets_go_or_is_cancelled(
    gateways: list[WarrenProcess], worker: ScriptedWorker, http: httpx.AsyncClient
) -> None:
    one, other = (gateway.url for gateway in gateways)
    async with http.stream("POST", f"{one}{CHAT}", json=chat_body(stream=True)) as asking:
        asked = asking.aiter_text()
        body = await anext(asked)
        path = f"/v1/streams/{asking.headers['x-request-id']}"
        async with http.stream("GET", f"{other}{path}") as resuming:
            resumed = resuming.aiter_text()
            rest = await anext(resumed)
            body += "".join([piece async for piece in asked])
            deleted = await http.delete(f"{one}{path}")
            rest += "".join([piece async for piece in resumed])

    assert events(body)[-1]["error"]["code"] == "taken_over"
    assert deleted.status_code == 200
    assert events(rest)[-1]["error"]["code"] == "cancelled"
    await worker.wait_settled()
    assert (await http.get(f"{other}{path}")).status_code == 410


async def test_nothing_is_left_at_the_broker(
    gateways: list[WarrenProcess],
    worker: ScriptedWorker,
    speaker: Speaker,
    http: httpx.AsyncClient,
) -> None:
    async with http.stream("POST", f"{gateways[0].url}{CHAT}", json=chat_body(stream=True)) as left:
        request_id = left.headers["x-request-id"]
    await worker.wait_cancelled(request_id)
    speaker.may_end.set()
    whole = await http.post(f"{gateways[0].url}{CHAT}", json=chat_body())

    for one in (request_id, whole.headers["x-request-id"]):

        async def is_gone(name: str = topology.reply_queue(one, 60).name) -> bool:
            return await worker.bus.inspect(name) is None

        await eventually(is_gone)
