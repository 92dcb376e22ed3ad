"""Equal requests are computed once, whichever gateways they come to."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import (
    SECRET,
    LiveGateway,
    chat_body,
    events,
    eventually,
    hears_a_worker,
    live_gateway,
    two_gateways,
)
from tests.support.workers.scripted_worker import (
    ScriptedJob,
    ScriptedWorker,
    wait_before_the_end,
)

CHAT = "/v1/chat/completions"
EXACT = {"x-warren-cache": "exact"}
WORDS = [f"w{number} " for number in range(8)]
WHOLE = "".join(WORDS) + "end"


class Speaker:
    """A script that says `WORDS`, each when it is told to, and is the same at every worker."""

    def __init__(self) -> None:
        self.num_allowed = 0
        self._changed = asyncio.Condition()

    async def __call__(self, job: ScriptedJob) -> None:
        await job.start()
        for number in range(len(job.log.chains[0].token_ids), len(WORDS)):
            await self._wait(number)
            await job.say(WORDS[number])
        await self._wait(len(WORDS))
        await job.finish("end")

    async def allow(self, num_words: int = len(WORDS) + 1) -> None:
        async with self._changed:
            self.num_allowed = num_words
            self._changed.notify_all()

    async def _wait(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_allowed > number)


@pytest.fixture
def speaker(worker: ScriptedWorker) -> Speaker:
    worker.script = speaker = Speaker()
    return speaker


class Stream:
    """A client that reads a stream, piece by piece."""

    def __init__(self, response: httpx.Response) -> None:
        self.id = str(response.headers["x-request-id"])
        self.result = response.headers.get("x-warren-cache")
        self.body = ""
        self._pieces = response.aiter_text()

    async def read_words(self, num_words: int) -> None:
        while len(re.findall(r"w\d ", self.body)) < num_words:
            self.body += await anext(self._pieces)

    async def read_all(self) -> str:
        async for piece in self._pieces:
            self.body += piece
        return self.body

    @property
    def last_id(self) -> str:
        ids = [line for line in self.body.splitlines() if line.startswith("id: ")]
        return ids[-1].removeprefix("id: ")


@asynccontextmanager
async def asking(
    gateway: LiveGateway, headers: dict[str, str] = EXACT, **more: Any
) -> AsyncIterator[Stream]:
    body = chat_body(stream=True, temperature=0, **more)
    headers = {"accept": "text/event-stream", **headers}
    async with gateway.http.stream("POST", CHAT, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


@asynccontextmanager
async def resuming(gateway: LiveGateway, stream: Stream) -> AsyncIterator[Stream]:
    headers = {"last-event-id": stream.last_id}
    async with gateway.http.stream("GET", f"/v1/streams/{stream.id}", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


async def ask(gateway: LiveGateway, headers: dict[str, str] = EXACT, **more: Any) -> httpx.Response:
    body = chat_body(**{"temperature": 0, **more})
    return await gateway.http.post(CHAT, json=body, headers=headers)


def text_of(body: str) -> str:
    """The text of a stream that has ended well."""
    *chunks, done = events(body)
    assert done == "[DONE]", done
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def comparable(body: str) -> list[Any]:
    """The chunks of a stream without the id and the time of the request."""
    varying = ("id", "created")
    chunks = [chunk for chunk in events(body) if chunk != "[DONE]"]
    return [{name: chunk[name] for name in chunk if name not in varying} for chunk in chunks]


@pytest.fixture
async def known(gateway: LiveGateway) -> LiveGateway:
    """A gateway that has heard its worker."""
    await hears_a_worker(gateway)
    return gateway


@asynccontextmanager
async def two(broker: MemoryBroker, **options: Any) -> AsyncIterator[tuple[LiveGateway, ...]]:
    async with two_gateways(broker, **options) as gateways:
        for gateway in gateways:
            await hears_a_worker(gateway)
        yield gateways


async def test_a_client_that_comes_in_the_middle_gets_the_same_stream(
    known: LiveGateway, worker: ScriptedWorker, speaker: Speaker
) -> None:
    async with asking(known, stream_options={"include_usage": True}) as first:
        await speaker.allow(4)
        await first.read_words(3)
        async with asking(known, stream_options={"include_usage": True}) as second:
            await second.read_words(3)
            await speaker.allow()
            bodies = await first.read_all(), await second.read_all()

    assert len(worker.jobs) == 1
    assert (first.result, second.result) == ("miss", "attached")
    assert first.id != second.id
    assert {chunk["id"] for chunk in events(second.body)[:-1]} == {second.id}
    assert text_of(bodies[0]) == text_of(bodies[1]) == WHOLE
    assert comparable(bodies[0])[-1] == comparable(bodies[1])[-1]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "seed": 7, "temperature": 0.9},
        {"logprobs": True, "top_logprobs": 2},
        {"user": "somebody"},
    ],
    ids=["choices", "logprobs", "user"],
)
async def test_an_answer_from_the_cache_is_that_of_an_own_run(
    known: LiveGateway, worker: ScriptedWorker, more: dict[str, Any]
) -> None:
    own = await ask(known, {}, **more)
    first = await ask(known, **more)
    again = await ask(known, **more)

    results = [answer.headers.get("x-warren-cache") for answer in (own, first, again)]
    assert results == [None, "miss", "hit"]
    assert len(worker.jobs) == 2
    answers = [answer.json() for answer in (own, first, again)]
    assert len({answer.pop("id") for answer in answers}) == 3
    for answer in answers:
        del answer["created"]
    assert answers[0] == answers[1] == answers[2]


async def test_what_is_not_determined_or_of_its_own_is_computed_for_itself(
    known: LiveGateway, worker: ScriptedWorker
) -> None:
    requests: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"detach": True},
        {"headers": {**EXACT, "idempotency-key": "one"}},
    ]
    answers = [await ask(known, **request) for request in requests]

    assert [answer.headers["x-warren-cache"] for answer in answers] == ["bypass"] * 3
    assert len(worker.jobs) == 3


async def test_a_setting_has_all_requests_computed_once_but_those_that_decline(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with live_gateway(bus, exact_cache=True) as gateway:
        await hears_a_worker(gateway)
        answers = [await ask(gateway, headers) for headers in ({}, {}, {"x-warren-cache": "off"})]

    results = [answer.headers.get("x-warren-cache") for answer in answers]
    assert results == ["miss", "hit", None]
    assert len(worker.jobs) == 2


async def test_an_unknown_kind_of_cache_is_refused(known: LiveGateway) -> None:
    answer = await ask(known, {"x-warren-cache": "maybe"})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-warren-cache"


async def test_equal_requests_at_two_gateways_have_one_execution(
    broker: MemoryBroker, worker: ScriptedWorker, speaker: Speaker
) -> None:
    async with (
        two(broker) as (here, there),
        asking(here) as first,
    ):
        await speaker.allow(3)
        await first.read_words(2)
        async with asking(there) as second:
            await second.read_words(3)
            await speaker.allow(5)
            await first.read_words(5)
            async with asking(here) as third:
                await speaker.allow()
                bodies = [await stream.read_all() for stream in (first, second, third)]

    assert [text_of(body) for body in bodies] == [WHOLE] * 3
    assert len(worker.jobs) == 1
    assert [first.result, second.result, third.result] == ["miss", "attached", "attached"]


async def test_an_execution_outlives_the_gateway_that_reads_it(
    broker: MemoryBroker, worker: ScriptedWorker, speaker: Speaker
) -> None:
    async with (
        two(broker) as (here, there),
        MemoryBus(broker) as bus,
        live_gateway(bus, secret=SECRET, drain_grace_s=0.1) as dying,
    ):
        await hears_a_worker(dying)
        async with asking(here) as first, asking(dying) as lost:
            await speaker.allow(2)
            await first.read_words(2)
            await lost.read_words(2)
            bus.sever(for_s=60)
            await speaker.allow(5)
            async with resuming(there, lost) as moved:
                await moved.read_words(3)
                await speaker.allow()
                rest = await moved.read_all()
                body = await first.read_all()

    seen = lost.body[: lost.body.rfind("\n\n") + 2]
    assert text_of(body) == WHOLE
    assert text_of(seen + rest) == WHOLE
    assert len(worker.jobs) == 1


async def test_an_execution_ends_with_its_last_client(
    known: LiveGateway, worker: ScriptedWorker, speaker: Speaker
) -> None:
    async with asking(known) as first:
        await speaker.allow(2)
        await first.read_words(1)
        async with asking(known) as second:
            await second.read_words(1)
        assert not worker.commands
    await worker.wait_cancelled(worker.jobs[0].job.request_id)

    assert len(worker.jobs) == 1


async def test_cancelling_a_stream_leaves_the_others(
    known: LiveGateway, worker: ScriptedWorker, speaker: Speaker
) -> None:
    async with asking(known) as first, asking(known) as second:
        await speaker.allow(2)
        await first.read_words(1)
        await second.read_words(1)
        answer = await known.http.delete(f"/v1/streams/{second.id}")
        cancelled = await second.read_all()
        await speaker.allow()
        body = await first.read_all()

    assert answer.json()["deleted"]
    assert '"code":"cancelled"' in cancelled
    assert text_of(body) == WHOLE


async def test_all_clients_get_the_failure_and_the_next_request_runs_again(
    known: LiveGateway, worker: ScriptedWorker
) -> None:
    may_fail = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await may_fail.wait()
        await job.fail("worker_lost", "The worker was lost.")

    worker.script = fail
    asking = [asyncio.create_task(ask(known)) for _ in range(3)]
    await worker.wait_until(lambda: len(worker.jobs) == 1)
    may_fail.set()
    answers = await asyncio.gather(*asking)
    wait_before_the_end(worker).set()
    later = await ask(known)

    assert [answer.json()["error"]["code"] for answer in answers] == ["worker_lost"] * 3
    assert later.json()["choices"][0]["message"]["content"] == "done"


async def test_a_failure_for_which_a_client_may_return_does_not_answer_later_requests(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    may_fail = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("w0 ")
        await may_fail.wait()
        await job.fail("worker_lost", "The worker was lost.")

    worker.script = fail
    async with two(broker) as (gateway, _):
        async with asking(gateway) as stayed:
            await stayed.read_words(1)
            async with asking(gateway) as gone:
                await gone.read_words(1)

            async def has_left() -> bool:
                return await gateway.sample("warren_gateway_requests_total") == 1

            await eventually(has_left)
            may_fail.set()
            seen = await stayed.read_all()
        wait_before_the_end(worker).set()
        async with asking(gateway) as later:
            body = await later.read_all()

    assert '"code":"worker_lost"' in seen
    assert (later.result, text_of(body)) == ("miss", "done")


async def test_only_the_gateway_that_accepts_an_execution_has_a_request_that_pays(
    broker: MemoryBroker, worker: ScriptedWorker, speaker: Speaker
) -> None:
    may_start = asyncio.Event()

    async def speak_later(job: ScriptedJob) -> None:
        await may_start.wait()
        await speaker(job)

    worker.script = speak_later
    async with two(broker) as (here, there), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(ask(here))
        await worker.wait_until(lambda: len(worker.jobs) == 1)
        second = tasks.create_task(ask(there))
        await worker.wait_until(lambda: len(worker.jobs) == 2)
        may_start.set()
        await speaker.allow()
        answers = [await first, await second]

    assert [answer.headers["x-warren-cache"] for answer in answers] == ["miss", "attached"]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


async def test_a_worker_that_dies_is_replaced_for_all(
    known: LiveGateway, worker: ScriptedWorker, worker_bus: MemoryBus, speaker: Speaker
) -> None:
    async with asking(known) as first, asking(known) as second:
        await speaker.allow(3)
        await first.read_words(3)
        await second.read_words(3)
        worker_bus.sever()
        await speaker.allow()
        bodies = await first.read_all(), await second.read_all()

    assert text_of(bodies[0]) == text_of(bodies[1]) == WHOLE


async def test_usage_says_what_was_cached(known: LiveGateway) -> None:
    for _ in range(3):
        await ask(known)

    async def usage() -> dict[str, Any]:
        answer = await known.http.get("/v1/usage", params={"group_by": "model"})
        rows = answer.json()["data"]
        return dict(rows[0]) if rows else {}

    async def is_recorded() -> bool:
        return (await usage()).get("cached_answers") == 2

    await eventually(is_recorded)
    # The scripted worker records nothing.
    assert (await usage())["requests"] == 2
    assert await known.sample("warren_gateway_exact_requests_total") == 3
    (runs,) = (await known.http.get("/admin/v1/status")).json()["runs"]
    assert (runs["num_exact_miss"], runs["num_exact_hit"]) == (1, 2)


@pytest.mark.parametrize("word_len", [1, 100_000], ids=["small", "large"])
async def test_a_stored_answer_is_read_by_another_gateway_after_its_log_is_gone(
    word_len: int, broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    wait_before_the_end(worker, last="x" * word_len).set()
    async with two(broker) as (here, there):
        first = again = await ask(here)

        async def is_stored() -> bool:
            """The answer is stored soon after its client has it."""
            nonlocal again
            await worker.bus.delete_queue(worker.jobs[-1].message.reply_to)
            again = await ask(there)
            return again.headers["x-warren-cache"] == "hit"

        await eventually(is_stored)
        stream_id = again.headers["x-request-id"]
        resumed = await there.http.get(f"/v1/streams/{stream_id}")

    assert first.headers["x-warren-cache"] == "miss"
    assert first.json()["choices"] == again.json()["choices"]
    assert resumed.status_code == 200
