"""Streams that outlive their client's connection, and their gateway."""

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.intake.admission import Admission, Entry
from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from gateway.intake.signer import Signer, derive_key
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Cancel, HandedOver
from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import (
    SECRET,
    LiveGateway,
    chat_body,
    events,
    eventually,
    live_gateway,
    skip,
    two_gateways,
)
from tests.support.gateway.lone_gateway import PLANTED
from tests.support.network.attacks import Victim
from tests.support.workers.jobs import wait_consumers
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

CHAT = "/v1/chat/completions"
UNKNOWN = f"chatcmpl-{'0' * 32}"
WORDS = [f"w{number} " for number in range(12)]


class Speaker:
    """A script that says `WORDS`, each when it is told to."""

    def __init__(self) -> None:
        self.may_say = asyncio.Semaphore(0)

    async def __call__(self, job: ScriptedJob) -> None:
        await job.start()
        for word in WORDS:
            await self.may_say.acquire()
            await job.say(word)
        await job.finish("end")

    def allow(self, num_words: int = len(WORDS)) -> None:
        for _ in range(num_words):
            self.may_say.release()


@pytest.fixture
def speaker(worker: ScriptedWorker) -> Speaker:
    speaker = Speaker()
    worker.script = speaker
    return speaker


class Reader:
    """A client that reads part of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.body = ""
        self._pieces = response.aiter_text()

    @property
    def request_id(self) -> str:
        return str(self.response.headers["x-request-id"])

    @property
    def last_id(self) -> str:
        return str(re.findall(r"^id: (\S+)$", self.body, re.MULTILINE)[-1])

    async def read_words(self, num_words: int) -> None:
        while len(partial_text_of(self.body).split()) < num_words:
            self.body += await anext(self._pieces)

    async def read_all(self) -> str:
        async for piece in self._pieces:
            self.body += piece
        return self.body


@asynccontextmanager
async def asking(gateway: LiveGateway, **more: Any) -> AsyncIterator[Reader]:
    body = chat_body(stream=True, **more)
    headers = {"accept": "text/event-stream"}
    async with gateway.http.stream("POST", CHAT, json=body, headers=headers) as response:
        assert response.status_code == 200
        yield Reader(response)


@asynccontextmanager
async def resuming(
    gateway: LiveGateway, request_id: str, last_id: str = "", **params: str
) -> AsyncIterator[Reader]:
    headers = {"last-event-id": last_id} if last_id else {}
    path = f"/v1/streams/{request_id}"
    async with gateway.http.stream("GET", path, headers=headers, params=params) as response:
        yield Reader(response)


async def resumed(
    gateway: LiveGateway, request_id: str, last_id: str = "", **params: str
) -> httpx.Response:
    headers = {"last-event-id": last_id} if last_id else {}
    return await gateway.http.get(f"/v1/streams/{request_id}", headers=headers, params=params)


def partial_text_of(body: str) -> str:
    complete = body[: body.rfind("\n\n") + 2]
    chunks = [chunk for chunk in events(complete) if chunk != "[DONE]" and "choices" in chunk]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def code_of(response: httpx.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


WHOLE = "".join(WORDS) + "end"


@pytest.mark.parametrize("how", ["header", "after", "header over after"])
async def test_a_stream_goes_on_at_another_gateway_where_it_was_left(
    broker: MemoryBroker, speaker: Speaker, how: str
) -> None:
    async with two_gateways(broker) as (first, second):
        async with asking(first, stream_options={"include_usage": True}) as left:
            speaker.allow(5)
            await left.read_words(3)
        ways: dict[str, dict[str, str]] = {
            "header": {"last_id": left.last_id},
            "after": {"after": left.last_id},
            "header over after": {"last_id": left.last_id, "after": "1.4"},
        }

        async with resuming(second, left.request_id, **ways[how]) as reader:
            speaker.allow()
            rest = await reader.read_all()

    seen = left.body[: left.body.rfind("\n\n") + 2]
    assert partial_text_of(seen) + partial_text_of(rest) == WHOLE
    assert events(rest)[-2]["usage"]["completion_tokens"] == len(WORDS) + 1
    assert events(rest)[-1] == "[DONE]"
    assert len({chunk["id"] for chunk in events(seen + rest)[:-1]}) == 1


async def test_a_worker_and_a_gateway_die_together_and_nothing_is_lost(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    async with two_gateways(broker) as (first, second):
        async with asking(first) as left:
            speaker.allow(4)
            await left.read_words(4)
            worker_bus.sever()
        async with resuming(second, left.request_id, left.last_id) as reader:
            speaker.allow()
            body = left.body + await reader.read_all()

    # The second delivery goes on behind the words of the first delivery.
    assert partial_text_of(body).startswith("w0 w1 w2 w3 w0 ")
    assert events(body)[-1] == "[DONE]"


async def test_the_client_that_came_back_leaves_no_job_to_be_cancelled(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker, disconnect_grace_s=40) as (first, second):
        async with asking(first) as left:
            speaker.allow(1)
            await left.read_words(1)
        async with resuming(second, left.request_id, left.last_id) as reader:
            skip(30)
        await wait_consumers(worker.bus, worker.jobs[0].message.reply_to, 0)
        skip(20)  # the first gateway's grace is over, the second one's is not
        await asyncio.sleep(0.1)
        async with resuming(
            first, left.request_id, reader.last_id if reader.body else left.last_id
        ) as last:
            speaker.allow()
            assert partial_text_of(await last.read_all()).endswith("end")
    assert not any(isinstance(command, Cancel) for command in worker.commands)


async def test_a_client_that_stays_away_is_cancelled_after_the_grace_and_not_before(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker, disconnect_grace_s=0.4) as (first, second):
        async with asking(first) as left:
            speaker.allow(1)
            await left.read_words(1)
            left_at = time.monotonic()
        await worker.wait_cancelled(left.request_id)
        assert time.monotonic() - left_at >= 0.4
        await worker.wait_until(lambda: worker.num_running == 0)
        response = await resumed(second, left.request_id, left.last_id)

    assert (response.status_code, code_of(response)) == (410, "stream_expired")


async def test_a_detached_request_goes_on_alone_and_is_there_later(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker, disconnect_grace_s=0) as (first, second):
        async with asking(first, detach=True) as left:
            speaker.allow(1)
            await left.read_words(1)
        speaker.allow()
        await worker.wait_until(lambda: worker.num_running == 0)

        for gateway in (second, first):  # whoever asks, as often as they ask
            response = await resumed(gateway, left.request_id, left.last_id)
            assert partial_text_of(response.text) == WHOLE.removeprefix("w0 ")
    assert worker.commands == []


async def test_a_failure_is_an_event_of_the_stream_for_whoever_reads_it(
    broker: MemoryBroker, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    may_fail = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await may_fail.wait()
        await job.fail("worker_lost", "gone")

    worker.script = fail
    async with two_gateways(broker) as (first, second):
        async with asking(first) as reader:
            await reader.read_words(1)
        # The gateway sees that the client has left.
        await wait_consumers(worker.bus, worker.jobs[0].message.reply_to, 0)
        may_fail.set()
        bodies = [
            (await resumed(g, reader.request_id, reader.last_id)).text for g in (second, first)
        ]

    for body in bodies:
        assert [event["error"]["code"] for event in events(body)] == ["worker_lost"]
    ends = [vars(record) for record in caplog.records if record.getMessage() == "request ended"]
    assert {end["code"] for end in ends if end["levelname"] == "WARNING"} == {"worker_lost"}


async def test_a_second_reader_takes_the_stream_over_from_a_live_one(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker
) -> None:
    async with two_gateways(broker) as (first, second), asking(first) as old:
        speaker.allow(2)
        await old.read_words(2)
        for gateway in (second, second, first):
            async with resuming(gateway, old.request_id) as reader:
                speaker.allow(1)
                await reader.read_words(3)
        async with resuming(first, old.request_id) as newest:
            speaker.allow()
            assert partial_text_of(await newest.read_all()) == WHOLE
        await old.read_all()

    assert events(old.body)[-1]["error"]["code"] == "taken_over"
    assert worker.commands == []


async def test_two_that_come_back_at_once_leave_one_reader_and_no_gap(
    broker: MemoryBroker, speaker: Speaker
) -> None:
    async with two_gateways(broker) as (first, second):
        async with asking(first) as left:
            speaker.allow(2)
            await left.read_words(2)
        both = [
            asyncio.create_task(resumed(gateway, left.request_id)) for gateway in (first, second)
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        speaker.allow()
        bodies = [(await task).text for task in both]

    ends = [events(body)[-1] for body in bodies]
    assert sorted(end == "[DONE]" for end in ends) == [False, True]
    assert partial_text_of(bodies[ends.index("[DONE]")]) == WHOLE


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_delete_ends_job_and_stream_from_any_gateway(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker, is_live: bool
) -> None:
    async with two_gateways(broker) as (first, second):
        async with asking(first) as reader:
            speaker.allow(1)
            await reader.read_words(1)
            if is_live:
                response = await second.http.delete(f"/v1/streams/{reader.request_id}")
                await reader.read_all()
                assert events(reader.body)[-1]["error"]["code"] == "cancelled"
        if not is_live:
            response = await second.http.delete(f"/v1/streams/{reader.request_id}")
        await worker.wait_cancelled(reader.request_id)
        again = await first.http.delete(f"/v1/streams/{reader.request_id}")

    assert response.status_code == 200
    assert response.json() == {"id": reader.request_id, "object": "stream", "deleted": True}
    assert (again.status_code, code_of(again)) == (410, "stream_expired")


async def test_a_delete_does_not_wait_for_a_client_that_reads_nothing(
    broker: MemoryBroker, worker: ScriptedWorker
) -> None:
    has_flooded = asyncio.Event()

    async def flood(job: ScriptedJob) -> None:
        await job.start()
        for _ in range(2000):
            await job.say("x" * 8000)
        has_flooded.set()
        await asyncio.Event().wait()

    worker.script = flood

    async with (
        two_gateways(broker, send_timeout_s=600) as (first, second),
        asking(first) as deaf,
    ):
        await has_flooded.wait()

        async def is_given_back() -> bool:
            state = await worker.bus.inspect(worker.jobs[0].message.reply_to)
            return state is not None and state.num_ready > 100 and state.num_consumers > 0

        await eventually(is_given_back)
        response = await second.http.delete(f"/v1/streams/{deaf.request_id}")
        await worker.wait_cancelled(deaf.request_id)

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (UNKNOWN, 410, "stream_expired"),
        ("x", 404, "stream_not_found"),
        ("jobs.scripted.interactive", 404, "stream_not_found"),
        (f"chatcmpl-{'0' * 31}G", 404, "stream_not_found"),
        (f"{UNKNOWN}?after=x", 400, "invalid_request"),
        (f"{UNKNOWN}?token=x", 401, "invalid_api_key"),
    ],
)
async def test_what_is_no_stream(gateway: LiveGateway, path: str, status: int, code: str) -> None:
    response = await gateway.http.get(f"/v1/streams/{path}")

    assert (response.status_code, code_of(response)) == (status, code)


async def test_the_log_of_another_programs_job_is_nobodys_stream(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    queue = topology.reply_queue(UNKNOWN, 60)
    await bus.declare(queue)
    reading = asyncio.create_task(resumed(gateway, UNKNOWN))
    await asyncio.sleep(0.1)
    started = {"type": "started", "worker": "w", "ticket": "t", "num_prompt_tokens": [1]}
    message = Message(json.dumps(started).encode(), content_type="application/json")
    await bus.publish(queue.bindings[0], message)

    response = await reading

    assert (response.status_code, code_of(response)) == (404, "stream_not_found")
    assert await bus.inspect(queue.name) is not None


async def test_a_stream_is_its_tenants_alone_and_a_token_is_as_good_as_a_key(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    alice, mallory = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("a", "m"))
    async with (
        two_gateways(broker, keys_file=keys.path) as (first, second),
        first.http.stream("POST", CHAT, json=chat_body(stream=True), headers=alice) as response,
    ):
        reader = Reader(response)
        speaker.allow(1)
        await reader.read_words(1)
        path = f"/v1/streams/{reader.request_id}"
        token = response.headers["x-stream-token"]
        tokens = {"GET": token, "DELETE": response.headers["x-cancel-token"]}

        for gateway in (first, second):
            for method in ("GET", "DELETE"):
                stolen = await gateway.http.request(method, path, headers=mallory)
                assert (stolen.status_code, code_of(stolen)) == (404, "stream_not_found")
                (other,) = (tokens[verb] for verb in tokens if verb != method)
                for bad in (tokens[method][:-1], f"ffffffff.{'0' * 32}", other, "", "é"):
                    forged = await gateway.http.request(method, path, params={"token": bad})
                    assert forged.status_code == 401
        assert worker.commands == []
        speaker.allow(1)
        await reader.read_words(2)  # it is still the first one's

        with_token = asyncio.create_task(second.http.get(f"{path}?token={token}"))
        await reader.read_all()
        speaker.allow()
        assert partial_text_of((await with_token).text) == WHOLE


async def test_a_key_that_may_not_cancel_receives_no_token_that_may(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    headers = {"authorization": f"Bearer {keys.add('a', scopes=('generate',))}"}
    async with live_gateway(bus, keys_file=keys.path) as gateway:
        response = await gateway.http.post(CHAT, json=chat_body(stream=True), headers=headers)

    assert response.status_code == 200
    assert "x-stream-token" in response.headers
    assert "x-cancel-token" not in response.headers


@pytest.mark.parametrize("change", ["revoked", "expired", "other"])
async def test_a_token_is_valid_as_long_as_its_key(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, change: str
) -> None:
    keys = KeyFile(tmp_path / "keys")
    key, other = keys.add("a"), keys.add("a")
    headers = {"authorization": f"Bearer {key}"}
    async with live_gateway(bus, keys_file=keys.path) as gateway:
        body = chat_body(stream=True, detach=True)
        response = await gateway.http.post(CHAT, json=body, headers=headers)
        path = f"/v1/streams/{response.headers['x-request-id']}"
        tokens = [response.headers[f"x-{name}-token"] for name in ("stream", "cancel")]
        end_key(keys, other if change == "other" else key, is_expired=change == "expired")

        async def is_read() -> bool:
            probe = {"authorization": f"Bearer {other if change == 'other' else key}"}
            return (await gateway.http.get("/v1/models", headers=probe)).status_code == 401

        await eventually(is_read)
        answers = [
            await gateway.http.request(method, path, params={"token": token})
            for method, token in zip(("GET", "DELETE"), tokens, strict=True)
        ]

    expected = [200, 200] if change == "other" else [401, 401]
    assert [answer.status_code for answer in answers] == expected


def end_key(keys: KeyFile, key: str, *, is_expired: bool) -> None:
    lines = keys.path.read_text().splitlines()
    (line,) = (one for one in lines if one.startswith(id_of(key)))
    lines.remove(line)
    ended = [f"{line} expires=2020-01-01"] if is_expired else []
    keys.path.write_text("\n".join([*lines, *ended, ""]))


async def test_a_token_of_an_older_gateway_is_valid_while_its_tenant_has_a_key(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    headers = {"authorization": f"Bearer {keys.add('a')}"}
    signer = Signer(SECRET.encode())
    async with live_gateway(broker, keys_file=keys.path, secret=SECRET) as gateway:
        body = chat_body(stream=True, detach=True)
        response = await gateway.http.post(CHAT, json=body, headers=headers)
        request_id = response.headers["x-request-id"]
        answers = [
            await gateway.http.get(f"/v1/streams/{request_id}", params={"token": token})
            for tenant in ("a", "gone")
            for token in [older_token(signer, request_id, tenant)]
        ]

    assert [answer.status_code for answer in answers] == [200, 401]


def older_token(signer: Signer, request_id: str, tenant: str) -> str:
    """A token as gateways wrote it that named the tenant in place of the key."""
    parts = (f"{int(time.time()) + 60:x}", signer.tenant_tag(tenant))
    content = msgspec.json.encode((request_id, "read", *parts))
    key = derive_key(SECRET.encode(), "stream tokens")
    return ".".join([*parts, hmac.digest(key, content, "sha256")[:16].hex()])


async def test_a_client_with_a_token_takes_a_place_of_its_tenant(
    broker: MemoryBroker,
    worker: ScriptedWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admitted: list[str] = []
    admit = Admission.admit_without_body

    def noted(admission: Admission, tenant: str) -> AbstractContextManager[Entry]:
        admitted.append(tenant)
        return admit(admission, tenant)

    monkeypatch.setattr(Admission, "admit_without_body", noted)
    keys = KeyFile(tmp_path / "keys")
    headers = {"authorization": f"Bearer {keys.add('a')}"}
    async with live_gateway(broker, keys_file=keys.path) as gateway:
        body = chat_body(stream=True, detach=True)
        response = await gateway.http.post(CHAT, json=body, headers=headers)
        path = f"/v1/streams/{response.headers['x-request-id']}"
        token = response.headers["x-stream-token"]
        resumed = await gateway.http.get(path, params={"token": token})

    assert partial_text_of(resumed.text) == "one two three"
    assert admitted == ["a"]


async def test_a_delete_that_is_refused_leaves_the_stream(bus: MemoryBus, tmp_path: Path) -> None:
    """Whose it is, only the worker that starts on it can say."""
    keys = KeyFile(tmp_path / "keys")
    headers = {"authorization": f"Bearer {keys.add('a')}"}
    queue = topology.reply_queue(UNKNOWN, 60)
    await bus.declare(topology.REPLIES, queue)

    async with live_gateway(bus, keys_file=keys.path) as gateway:
        response = await gateway.http.delete(f"/v1/streams/{UNKNOWN}", headers=headers)

    assert (response.status_code, code_of(response)) == (503, "service_unavailable")
    assert await bus.inspect(queue.name) is not None


async def test_a_stream_nobody_reads_is_its_tenants_alone_too(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    alice, mallory = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("a", "m"))
    async with two_gateways(broker, keys_file=keys.path) as (first, second):
        body = chat_body(stream=True, detach=True)
        response = await first.http.post(CHAT, json=body, headers=alice)
        path = f"/v1/streams/{response.headers['x-request-id']}"

        for method in ("GET", "DELETE"):
            stolen = await second.http.request(method, path, headers=mallory)
            assert (stolen.status_code, code_of(stolen)) == (404, "stream_not_found")
        assert partial_text_of((await second.http.get(path, headers=alice)).text) == "one two three"


async def test_a_gateway_that_drains_leaves_its_streams_to_another_one(
    broker: MemoryBroker, speaker: Speaker, worker: ScriptedWorker
) -> None:
    async with (
        live_gateway(broker) as second,
        live_gateway(broker, drain_grace_s=0.1) as first,
        asking(first) as left,
    ):
        speaker.allow(3)
        await left.read_words(2)
        first.server.stop()
        await left.read_all()
        async with resuming(second, left.request_id, left.last_id) as reader:
            speaker.allow()
            rest = await reader.read_all()

    *_, error = events(left.body)
    assert error["error"]["code"] == "service_unavailable"
    assert partial_text_of(left.body) + partial_text_of(rest) == WHOLE
    assert worker.commands == []


async def test_a_stream_that_cannot_be_continued_says_why(
    bus: MemoryBus, worker_bus: MemoryBus
) -> None:
    log = topology.reply_queue(UNKNOWN, 600)
    await worker_bus.declare(log)

    async with (
        worker_bus.consume(log.name, is_exclusive=True),
        live_gateway(bus, first_event_timeout_s=0.05) as gateway,
        resuming(gateway, UNKNOWN) as reader,
    ):
        skip(60)  # longer than the gateway waits for the other reader
        body = await reader.read_all()

    assert [event["error"]["message"] for event in events(body)] == [
        "Another reader still has this stream."
    ]


async def test_a_client_that_does_not_read_costs_no_memory_and_misses_nothing(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    num_words = 2000
    word = "x" * 8000

    async def speak_at_once(job: ScriptedJob) -> None:
        await job.start()
        for number in range(num_words):
            await job.say(f"{number}{word} ")
        await job.finish("end")

    worker.script = speak_at_once
    async with live_gateway(bus, send_timeout_s=600) as gateway, asking(gateway) as reader:
        await worker.wait_until(lambda: bool(worker.jobs))

        async def is_given_back() -> bool:
            name = worker.jobs[0].message.reply_to
            state = await bus.inspect(name)
            return state is not None and state.num_ready > num_words / 2 and state.num_consumers > 0

        await eventually(is_given_back)
        body = await reader.read_all()

    assert partial_text_of(body) == "".join(f"{n}{word} " for n in range(num_words)) + "end"


async def test_a_client_that_never_reads_again_is_given_up(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async def speak_for_ever(job: ScriptedJob) -> None:
        await job.start()
        while True:
            await job.say("x" * 20_000)
            await asyncio.sleep(0)

    worker.script = speak_for_ever
    async with live_gateway(bus, send_timeout_s=0.5) as gateway, asking(gateway) as reader:
        await worker.wait_cancelled(reader.request_id)


NOTICE = re.compile(r"^: continued (.+)$", re.MULTILINE)


async def move(worker: ScriptedWorker, broker: MemoryBroker, how: str, reader: Reader) -> None:
    """End the run of the first word's worker; another worker ends the answer."""
    await reader.read_words(1)
    if how == "handed_over":
        await worker.jobs[0].publish(HandedOver(ticket=worker.jobs[0].ticket))
    await worker.__aexit__()
    async with MemoryBus(broker) as bus, ScriptedWorker(bus, go_on):
        await reader.read_all()


async def say_and_wait(job: ScriptedJob) -> None:
    await job.start()
    await job.say("one ")
    await asyncio.Event().wait()


async def go_on(job: ScriptedJob) -> None:
    await job.start()
    await job.finish("two")


@pytest.mark.parametrize("how", ["worker_lost", "handed_over"])
async def test_a_client_with_event_ids_is_informed_that_another_worker_continues(
    broker: MemoryBroker, bus: MemoryBus, worker: ScriptedWorker, how: str
) -> None:
    worker.script = say_and_wait
    async with live_gateway(bus, disconnect_grace_s=5) as gateway:
        async with asking(gateway, detach=True) as reader:
            await move(worker, broker, how, reader)
        again = await resumed(gateway, reader.request_id)

    for body in (reader.body, again.text):
        assert [json.loads(said) for said in NOTICE.findall(body)] == [
            {"attempt": 2, "reason": how}
        ]
    assert partial_text_of(reader.body) == partial_text_of(again.text) == "one two"


async def test_a_client_without_event_ids_is_sent_data_alone(
    broker: MemoryBroker, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = say_and_wait
    async with (
        live_gateway(bus) as gateway,
        gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        reader = Reader(response)
        await move(worker, broker, "worker_lost", reader)

    assert partial_text_of(reader.body) == "one two"
    assert NOTICE.findall(reader.body) == []


async def test_logs_that_another_program_has_described_cost_little(victim: Victim) -> None:
    async def attack(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=NO_TLS) as client:
            for _ in range(4):
                resumed = [client.get(f"/v1/streams/{name}") for name in PLANTED]
                assert {one.status_code for one in await asyncio.gather(*resumed)} == {200, 404}

    await victim.assert_attack_costs_little(attack)
