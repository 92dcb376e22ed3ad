"""Who gets in."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from gateway.intake.admission import Admission
from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.errors import Overloaded, Unavailable
from shared.messages import Announcement, encode
from tests.support.gateway.http import LiveGateway, chat_body, eventually, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker, start_only

UNKNOWN = "0" * 32


def test_one_more_than_there_are_places_is_refused() -> None:
    admission = Admission(1, 100)

    with (
        admission.admit_without_body(""),
        pytest.raises(Overloaded),
        admission.admit_without_body(""),
    ):
        pass

    with admission.admit_without_body(""):
        assert admission.num_requests == 1


def test_nobody_enters_after_the_close() -> None:
    admission = Admission(1, 100)
    admission.close()

    with pytest.raises(Unavailable), admission.admit_without_body(""):
        pass


def test_bodies_are_limited_together() -> None:
    admission = Admission(2, 100)

    with admission.admit_with_body("") as one:
        one.hold(60)
        with admission.admit_with_body("") as other, pytest.raises(Overloaded):
            other.hold(60)
    with admission.admit_with_body("") as one:
        one.hold(100)


def hold(places: ExitStack, admission: Admission, tenant: str, num: int) -> None:
    for _ in range(num):
        places.enter_context(admission.admit_without_body(tenant))


def test_a_tenant_alone_has_seven_eighths() -> None:
    admission = Admission(64, 1 << 20)

    with ExitStack() as places:
        hold(places, admission, "alice", 56)

        with pytest.raises(Overloaded):
            hold(places, admission, "alice", 1)
        hold(places, admission, "bob", 8)
        with pytest.raises(Overloaded):
            hold(places, admission, "carol", 1)

    assert admission.num_requests == 0


def test_what_has_ended_is_free_again() -> None:
    admission = Admission(64, 1 << 20)

    for tenant in ("alice", "bob"):
        with ExitStack() as places:
            hold(places, admission, tenant, 56)


def test_tenants_with_equal_shares_leave_one_for_the_next() -> None:
    admission, tenants = Admission(80, 1 << 20), [f"tenant {k}" for k in range(9)]
    with ExitStack() as places:
        for tenant in tenants:
            hold(places, admission, tenant, 8)

        for tenant in tenants:
            with pytest.raises(Overloaded):
                hold(places, admission, tenant, 1)
        hold(places, admission, "newcomer", 8)


def test_without_tenants_nothing_is_kept() -> None:
    admission = Admission(64, 1 << 20, has_tenants=False)

    with ExitStack() as places:
        hold(places, admission, "", 64)


def test_tenants_share_the_bytes_of_bodies() -> None:
    admission = Admission(64, 800)

    with admission.admit_with_body("alice") as long, admission.admit_with_body("bob") as short:
        long.hold(650)
        with pytest.raises(Overloaded):
            long.hold(51)
        short.hold(150)


async def test_one_tenant_does_not_keep_out_another(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    file = KeyFile(tmp_path / "keys")
    alice, bob = ({"authorization": f"Bearer {file.add(tenant)}"} for tenant in ("alice", "bob"))
    async with (
        live_gateway(bus, max_requests=8, keys_file=file.path) as gateway,
        AsyncExitStack() as streams,
    ):

        async def ask(headers: dict[str, str]) -> httpx.Response:
            request = gateway.http.stream(
                "POST", "/v1/chat/completions", json=chat_body(stream=True), headers=headers
            )
            return await streams.enter_async_context(request)

        assert {(await ask(alice)).status_code for _ in range(7)} == {200}

        refused = await ask(alice)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert (await ask(bob)).status_code == 200


async def test_a_full_gateway_says_when_to_come_back(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with live_gateway(bus, max_requests=2) as gateway, AsyncExitStack() as streams:
        for _ in range(2):
            await streams.enter_async_context(
                gateway.http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True))
            )

        response = await gateway.chat()

        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        assert response.headers["retry-after-ms"] == "1000"
        assert len(worker.jobs) == 2


async def is_admitted(gateway: LiveGateway) -> None:
    """Wait for the first request."""

    async def is_waiting() -> bool:
        health = (await gateway.http.get("/health")).json()
        return bool(health["requests"] == 1)

    await eventually(is_waiting)


async def test_the_official_client_sees_a_rate_limit(bus: MemoryBus) -> None:
    async with live_gateway(bus, max_requests=1) as gateway:
        await bus.declare(topology.jobs_queue(MODEL, "interactive"))
        waiting = asyncio.create_task(gateway.chat())
        await is_admitted(gateway)

        with pytest.raises(openai.RateLimitError):
            await gateway.openai.completions.create(model=MODEL, prompt="x")

        waiting.cancel()


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/responses/resp_{UNKNOWN}",
        f"/v1/responses/resp_{UNKNOWN}/input_items",
        "/v1/files",
        f"/v1/files/file-{UNKNOWN}/content",
        "/v1/batches",
        f"/v1/batches/batch_{UNKNOWN}",
        f"/v1/conversations/conv_{UNKNOWN}/items",
        f"/v1/conversations/conv_{UNKNOWN}/items/msg_1",
        "/v1/usage",
    ],
)
async def test_reading_what_is_stored_takes_a_slot(bus: MemoryBus, path: str) -> None:
    async with live_gateway(bus, max_requests=1) as gateway:
        await bus.declare(topology.jobs_queue(MODEL, "interactive"))
        waiting = asyncio.create_task(gateway.chat())
        await is_admitted(gateway)

        response = await gateway.http.get(path)

        waiting.cancel()
    assert response.status_code == 429


@pytest.mark.parametrize("gateway_options", [{"backlog_stale_s": 3600.0}])
async def test_a_request_that_would_wait_too_long_is_refused_with_the_time_to_come_back(
    gateway: LiveGateway, worker_bus: MemoryBus
) -> None:
    queue = topology.jobs_queue("slow", "interactive")
    await worker_bus.declare(queue)
    for _ in range(1000):
        await worker_bus.publish(queue.bindings[0], Message(b""))

    async def announce(num_answered: int) -> None:
        announcement = Announcement(
            worker="worker.slow",
            model="slow",
            vocab_size=100,
            max_seq_len=2048,
            fingerprint="f",
            max_num_seqs=4,
            num_running=4,
            num_answered=num_answered,
        )
        await worker_bus.publish(topology.ANNOUNCEMENTS, Message(encode(announcement)))

    async def is_heard() -> bool:
        models = (await gateway.http.get("/v1/models")).json()["data"]
        return "slow" in [model["id"] for model in models]

    async def answer_one() -> None:
        """At most five a second, and whoever is not heard is forgotten."""
        while True:
            await asyncio.sleep(0.2)
            await announce(1)

    async def is_waiting() -> bool:
        state = await worker_bus.inspect(queue.name)
        return state is not None and state.num_ready == 1001

    await announce(0)
    await eventually(is_heard)
    answering = asyncio.create_task(answer_one())
    await asyncio.sleep(0.4)
    first = asyncio.create_task(gateway.chat(model="slow"))  # nobody has noticed yet
    await eventually(is_waiting)
    refused = await gateway.chat(model="slow")
    first.cancel()
    answering.cancel()

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    state = await worker_bus.inspect(queue.name)
    assert state is not None
    assert state.num_ready <= 1001


async def test_a_full_queue_is_a_rate_limit(gateway: LiveGateway, worker_bus: MemoryBus) -> None:
    full = topology.jobs_queue("full", "interactive")
    assert full.max_length is not None
    await worker_bus.declare(full)
    message = Message(b"")
    for _ in range(full.max_length):
        await worker_bus.publish(full.bindings[0], message)

    response = await gateway.chat(model="full")

    assert response.status_code == 429
    assert response.headers["retry-after"]
