"""Bytes that are not HTTP are rejected if possible, and do not affect other clients."""

import asyncio

import httpx
import pytest

from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, eventually, live_gateway, skip
from tests.support.workers.scripted_worker import ScriptedWorker

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: warren\r\nContent-Type: application/json\r\n"


async def send_raw(gateway: LiveGateway, request: bytes) -> bytes:
    """The response until the gateway closes, after ``request`` and the end of the client's data."""
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def is_healthy(gateway: LiveGateway) -> bool:
    return (await gateway.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"\x00\xff\x16\x03\x01" * 100, id="garbage"),
        pytest.param(CHAT + b"Content-Length: many\r\n\r\n{}", id="length is no number"),
        pytest.param(CHAT + b"Content-Length: -2\r\n\r\n{}", id="negative length"),
        pytest.param(CHAT + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", id="endless length"),
        pytest.param(CHAT + b"Content-Length: 2\r\n\r\n{}{}{}", id="length below the body's"),
        pytest.param(CHAT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}", id="broken chunk"),
    ],
)
async def test_what_is_no_request_is_refused(gateway: LiveGateway, request_bytes: bytes) -> None:
    answer = await send_raw(gateway, request_bytes)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert await is_healthy(gateway)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(CHAT + b"Content-Length: 99\r\n\r\n{", id="body"),
        pytest.param(CHAT + b"X-Name: aaaa", id="header"),
    ],
)
async def test_a_request_that_breaks_off_is_dropped(
    gateway: LiveGateway, request_bytes: bytes
) -> None:
    answer = await send_raw(gateway, request_bytes)

    assert answer == b""
    assert await gateway.sample("warren_gateway_requests_running") == 0
    assert await is_healthy(gateway)


async def test_an_upload_takes_a_place_and_has_to_end(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with live_gateway(bus, max_requests=1) as gateway:

        async def is_full() -> bool:
            return (await gateway.chat()).status_code == 429

        url = httpx.URL(gateway.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(CHAT + b"Content-Length: 99\r\n\r\n{")
        await eventually(is_full)
        skip(60)
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()

        assert status.startswith(b"HTTP/1.1 408 ")
        assert (await gateway.chat()).status_code == 200
