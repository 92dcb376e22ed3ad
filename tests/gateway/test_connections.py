"""What a connection may cost before a request is known, with whatever a client sends."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from gateway import connections, server
from gateway.connections import Connections
from gateway.metrics import Metrics
from shared import settings
from shared.bus.memory import MemoryBus
from shared.settings import GatewaySettings
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import LiveGateway, chat_body, eventually, live_gateway, skip
from tests.support.network.attacks import Victim
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

LIVE = b"GET /live HTTP/1.1\r\nHost: warren\r\n"
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: warren\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
ATTACKERS = "127.0.0.2"
"""An address of their own, because they use up its connections."""


class Connection:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, request: bytes = b"") -> bytes:
        """The first line that is answered; empty if the connection is closed."""
        with suppress(ConnectionError):
            self.writer.write(request)
            return await self.reader.readline()
        return b""

    async def error(self) -> str:
        """The code in the body of an error, whose first line was read."""
        _, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        code: str = json.loads(body)["error"]["code"]
        return code


@asynccontextmanager
async def connected(url: str, address: str = "127.0.0.1") -> AsyncIterator[Connection]:
    """Connect from ``address``."""
    place = httpx.URL(url)
    reader, writer = await asyncio.open_connection(place.host, place.port, local_addr=(address, 0))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(LIVE + b"X-Name: %s\r\n\r\n" % (b"a" * (65 << 10)), 431, id="header"),
        pytest.param(LIVE + b"X-Name: " + b"a" * (1 << 20), 431, id="header without an end"),
        pytest.param(LIVE + b"X-Name: %s\r\n" % (b"a" * 8000) * 10, 431, id="headers"),
        pytest.param(LIVE + b"a:b\r\n" * 200, 431, id="small headers"),
        pytest.param(LIVE + b"a" * (1 << 20), 431, id="name without an end"),
        pytest.param(b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * (9 << 10)), 414, id="URL"),
        pytest.param(b"GET /" + b"a" * (1 << 20), 414, id="URL without an end"),
        pytest.param(CHUNKED + b"0\r\nX-Name: " + b"a" * (1 << 20), 431, id="trailer"),
        pytest.param(CHUNKED + b"0\r\n" + b"a:b\r\n" * 200, 431, id="trailers"),
    ],
)
async def test_a_large_head_is_refused(
    gateway: LiveGateway, request_bytes: bytes, status: int
) -> None:
    async with connected(gateway.url) as client:
        answer = await client.answer(request_bytes)

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert await client.error()
    assert await gateway.sample("warren_gateway_errors_total") == 1


async def test_a_head_within_the_limits_is_served(gateway: LiveGateway) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (k, b"a" * 600) for k in range(100))

    async with connected(gateway.url) as client:
        answer = await client.answer(LIVE + headers + b"\r\n")

    assert answer == b"HTTP/1.1 200 OK\r\n"


async def test_a_trailer_is_no_header(gateway: LiveGateway) -> None:
    """It would arrive after its request was authenticated."""
    body = b"2\r\n{}\r\n0\r\nContent-Encoding: gzip\r\n\r\n"

    async with connected(gateway.url) as client:
        answer = await client.answer(CHUNKED + body)

    assert answer.startswith(b"HTTP/1.1 400 ")


def test_the_headers_have_ten_seconds_and_the_next_request_five() -> None:
    assert (connections._HEAD_TIMEOUT_S, server._KEEP_ALIVE_S) == (10, 5)


async def test_a_connection_without_a_further_request_is_closed(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server._KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr("gateway.connections._HEAD_TIMEOUT_S", 600)
    async with live_gateway(bus) as gateway, connected(gateway.url) as client:
        await client.answer(LIVE + b"\r\n")

        await client.reader.read()


async def wait_too_long(gateway: LiveGateway) -> None:
    """Let the time pass within which a head has to arrive, once the gateway has read all that was
    sent: another client, which came later, is answered."""
    await gateway.http.get("/live")
    skip(connections._HEAD_TIMEOUT_S)
    await asyncio.sleep(0.01)  # for the timers that are due


@pytest.mark.parametrize("before", [b"", LIVE + b"\r\n"], ids=["first", "second"])
async def test_a_head_has_to_arrive_in_time(gateway: LiveGateway, before: bytes) -> None:
    async with connected(gateway.url) as client:
        if before:
            await client.answer(before)
            await client.reader.readuntil(b'{"status":"ok"}')

        client.writer.write(b"GET /live")
        await wait_too_long(gateway)

        assert (await client.answer()).startswith(b"HTTP/1.1 408 ")
        assert await client.error() == "request_timeout"


async def test_a_silent_connection_is_closed(gateway: LiveGateway) -> None:
    async with connected(gateway.url) as client:
        await wait_too_long(gateway)

        assert await client.answer() == b""


async def test_a_body_that_nobody_reads_has_to_end(gateway: LiveGateway) -> None:
    async with connected(gateway.url) as client:
        await client.answer(LIVE + b"Content-Length: 99\r\n\r\n")
        await client.reader.readuntil(b'{"status":"ok"}')
        await wait_too_long(gateway)

        assert await client.reader.read() == b""


async def test_a_request_outlasts_the_timeout_of_its_head(gateway: LiveGateway) -> None:
    async with connected(gateway.url) as client:
        client.writer.write(CHUNKED + b"2\r\n{}\r\n")
        await wait_too_long(gateway)

        assert (await client.answer(b"0\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("max_connections", "limit"), [(2, "max_connections"), (8, "max_connections_per_address")]
)
async def test_connections_are_limited(
    bus: MemoryBus,
    max_connections: int,
    limit: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG, "gateway.connections")
    monkeypatch.setattr(GatewaySettings, "max_connections", max_connections)
    num_allowed = max_connections - max_connections // 8  # the last eighth is for other addresses
    async with live_gateway(bus) as gateway:
        async with AsyncExitStack() as held:
            for _ in range(num_allowed):
                client = await held.enter_async_context(connected(gateway.url))
                assert (await client.answer(LIVE + b"\r\n")).startswith(b"HTTP/1.1 200 ")

            async with connected(gateway.url) as refused:
                assert (await refused.answer()).startswith(b"HTTP/1.1 503 ")
                assert await refused.error() == "service_unavailable"

        async def has_room() -> bool:
            async with connected(gateway.url) as client:
                return (await client.answer(LIVE + b"\r\n")).startswith(b"HTTP/1.1 200 ")

        await eventually(has_room)
        metrics = (await gateway.http.get("/metrics")).text

    (line, *_) = (vars(one) for one in caplog.records if one.message == "connection refused")
    assert line["limit"] == limit
    assert f'warren_gateway_requests_refused_total{{reason="{limit}"}} ' in metrics
    assert f'warren_gateway_requests_refused_total{{reason="{limit}"}} 0.0' not in metrics


async def test_another_address_has_connections_of_its_own(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewaySettings, "max_connections", 8)
    async with live_gateway(bus) as gateway, AsyncExitStack() as held:
        for _ in range(7):
            client = await held.enter_async_context(connected(gateway.url))
            assert (await client.answer(LIVE + b"\r\n")).startswith(b"HTTP/1.1 200 ")
        other = await held.enter_async_context(connected(gateway.url, "127.0.0.2"))

        assert (await other.answer(LIVE + b"\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        pytest.param("2001:db8::1", "2001:db8::ffff:0:0:9", True, id="one network"),
        pytest.param("2001:db8::1", "2001:db8:0:1::1", False, id="two networks"),
        pytest.param("fe80::1%eth0", "fe80::2%eth0", True, id="one link"),
        pytest.param("::ffff:192.0.2.1", "192.0.2.1", True, id="one IPv4 address"),
        pytest.param("::ffff:192.0.2.1", "::ffff:192.0.2.2", False, id="two IPv4 addresses"),
    ],
)
def test_the_addresses_of_an_ipv6_network_count_as_one(
    first: str, second: str, are_one: bool
) -> None:
    connections = Connections(settings.load(GatewaySettings), 8, Metrics(), send_timeout_s=30)
    assert [connections.enter(first) for _ in range(7)] == [None] * 7

    assert connections.enter(second) == ("max_connections_per_address" if are_one else None)

    connections.leave(first)
    assert connections.enter(first) == (None if are_one else "max_connections_per_address")


async def test_pipelined_requests_are_limited(gateway: LiveGateway) -> None:
    async with connected(gateway.url) as client:
        client.writer.write((LIVE + b"\r\n") * 100)
        client.writer.write_eof()
        with suppress(ConnectionError):
            assert (await client.reader.read()).count(b"HTTP/1.1 200 ") <= 18


LARGE_BYTES = 12 << 20  # more than the operating system buffers, and less than a message may have


def post(path: str, **body: Any) -> bytes:
    content = json.dumps({"model": "scripted", **body}).encode()
    head = (
        "POST {} HTTP/1.1\r\nHost: warren\r\nContent-Type: application/json\r\nContent-Length: {}"
    )
    return head.format(path, len(content)).encode() + b"\r\n\r\n" + content


DETACHED = (b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 429 Too Many Requests\r\n")
MESSAGES = [{"role": "user", "content": "x"}]
LARGE_ANSWERS = [
    pytest.param(post("/v1/chat/completions", messages=MESSAGES), id="whole"),
    pytest.param(post("/v1/chat/completions", messages=MESSAGES, stream=True), id="stream"),
    pytest.param(post("/detokenize", tokens=[99] * (LARGE_BYTES // 100)), id="quick"),
]


async def say_much(job: ScriptedJob) -> None:
    await job.start()
    for _ in range(16):
        await job.say("x" * (LARGE_BYTES // 16))
    await job.finish()


@pytest.mark.parametrize("request_bytes", LARGE_ANSWERS)
async def test_a_client_that_does_not_read_is_disconnected(
    bus: MemoryBus, worker: ScriptedWorker, request_bytes: bytes
) -> None:
    worker.script = say_much
    async with (
        live_gateway(bus, max_requests=1, send_timeout_s=0.5) as gateway,
        connected(gateway.url) as client,
    ):
        assert await client.answer(request_bytes) == b"HTTP/1.1 200 OK\r\n"

        await eventually(partial(has_room, gateway))

        with suppress(ConnectionError):
            assert len(await client.reader.read()) < LARGE_BYTES


@pytest.mark.parametrize("request_bytes", LARGE_ANSWERS)
async def test_a_request_lasts_until_its_response_is_read(
    bus: MemoryBus, worker: ScriptedWorker, request_bytes: bytes
) -> None:
    worker.script = say_much
    async with live_gateway(bus, max_requests=1) as gateway, connected(gateway.url) as client:
        assert await client.answer(request_bytes) == b"HTTP/1.1 200 OK\r\n"
        assert not await has_room(gateway)

        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readexactly(LARGE_BYTES - 99)

        await eventually(partial(has_room, gateway))


async def upload(gateway: LiveGateway) -> str:
    """The path of the content of a large file."""
    files = gateway.openai.files
    file = await files.create(file=("in.jsonl", bytes(LARGE_BYTES)), purpose="batch")
    return f"/v1/files/{file.id}/content"


async def respond(gateway: LiveGateway) -> str:
    """The path of a large response."""
    response = await gateway.openai.responses.create(model="scripted", input="x")
    return f"/v1/responses/{response.id}"


@pytest.mark.parametrize("store", [upload, respond])
async def test_reading_what_is_stored_lasts_until_it_is_received(
    bus: MemoryBus, worker: ScriptedWorker, store: Callable[[LiveGateway], Awaitable[str]]
) -> None:
    worker.script = say_much
    async with live_gateway(bus, max_requests=1) as gateway, connected(gateway.url) as client:
        path = await store(gateway)
        await client.answer(f"GET {path} HTTP/1.1\r\nHost: warren\r\n\r\n".encode())
        assert not await has_room(gateway)

        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readexactly(LARGE_BYTES)

        await eventually(partial(has_room, gateway))


async def has_room(gateway: LiveGateway) -> bool:
    return (await gateway.post("/tokenize", model="scripted", prompt="x")).status_code == 200


async def test_an_attack_costs_little(victim: Victim) -> None:
    parts = {
        "silence": b"",
        "half a head": LIVE + b"X-Name: " + b"a" * (48 << 10),
        "endless header": LIVE + b"X-Name: " + b"a" * (1 << 20),
        "endless URL": b"GET /" + b"a" * (1 << 20),
        "half a body": CHUNKED + b"%x\r\n" % (1 << 20) + b"a" * (1 << 20),
        "pipeline": (LIVE + b"\r\n") * 20_000,
    }

    for name, part in parts.items():
        attack = partial(send_and_stay, [part] * 300)
        await victim.assert_attack_costs_little(attack, name)


async def send_and_stay(parts: Sequence[bytes], url: str, pause_s: float = 0.005) -> None:
    """Send each part on a connection of its own, and read nothing."""
    async with AsyncExitStack() as stack:
        for part in parts:
            attacker = await stack.enter_async_context(connected(url, ATTACKERS))
            attacker.writer.write(part)
            await asyncio.sleep(pause_s)
        await asyncio.sleep(1)


async def test_streams_that_nobody_reads_cost_little(victim: Victim) -> None:
    messages = [{"role": "user", "content": " ".join(["x" * 10_000] * 20)}]
    request = post("/v1/chat/completions", messages=messages, stream=True)

    # More than a request takes, so that they do not wait together while others have the processors.
    attack = partial(send_and_stay, [request] * 100, pause_s=0.02)

    await victim.assert_attack_costs_little(attack)


async def test_requests_that_detach_cost_little(victim: Victim) -> None:
    request = post("/v1/chat/completions", messages=MESSAGES, stream=True, detach=True)

    await victim.assert_attack_costs_little(partial(send_and_leave, [request] * 300))


async def send_and_leave(requests: Sequence[bytes], url: str) -> None:
    for request in requests:
        async with connected(url, ATTACKERS) as attacker:
            assert await attacker.answer(request) in DETACHED


async def test_constraints_that_are_slow_to_check_cost_little(victim: Victim) -> None:
    schemas = [{"type": "integer", "multipleOf": 999_901 + k} for k in range(3)]

    async def attack(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=None, verify=NO_TLS) as client:
            checks = [
                client.post("/v1/chat/completions", json=chat_body(guided_json=schema))
                for schema in schemas
            ]
            assert {one.status_code for one in await asyncio.gather(*checks)} <= {400, 429}

    await victim.assert_attack_costs_little(attack)
