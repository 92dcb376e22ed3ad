"""The proxy's configuration in a real nginx, before two real gateways."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.infra.dns import DnsServer, dns_server
from tests.support import PATIENCE_S
from tests.support.deployment.processes import free_port
from tests.support.gateway.http import (
    SECRET,
    LiveGateway,
    chat_body,
    eventually,
    live_gateway,
    text_of,
)
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    repeat_the_prompt,
)

PROXY = Path(__file__).parents[2] / "infra" / "proxy"
HOSTS = ("127.0.0.1", "127.0.0.2")
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
REQUESTS = "warren_gateway_request_duration_seconds_count"

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@dataclass
class Proxied:
    """Two gateways on the same port of two addresses, the name that leads to them, and their
    proxy."""

    gateways: list[LiveGateway]
    worker: ScriptedWorker
    dns: DnsServer
    https: httpx.AsyncClient
    plain: httpx.AsyncClient


def write_config(directory: Path, places: dict[str, str]) -> Path:
    """The shipped configuration with the test's ports and paths, and nothing else changed."""
    text = (PROXY / "nginx.conf").read_text()
    for shipped, tested in places.items():
        assert shipped in text
        text = text.replace(shipped, tested)
    config = directory / "nginx.conf"
    config.write_text(text)
    return config


def make_certificate(directory: Path) -> None:
    directory.mkdir()
    subprocess.run(
        ["sh", PROXY / "certificate.sh", directory], check=True, capture_output=True, text=True
    )


@asynccontextmanager
async def nginx(config: Path, port: int) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *("nginx", "-c", config, "-p", config.parent, "-g", "daemon off; user root;"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await is_listening(port):
                assert process.returncode is None, (await process.communicate())[1].decode()
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    broker = MemoryBroker()
    port, http_port, https_port = free_port(), free_port(), free_port()
    make_certificate(tmp_path / "tls")
    trust = ssl.create_default_context(cafile=str(tmp_path / "tls" / "tls.crt"))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        worker = await enter(ScriptedWorker(await enter(MemoryBus(broker))))
        dns, dns_port = await enter(dns_server(*HOSTS))
        options = {"port": port, "secret": SECRET, "disconnect_grace_s": 60, "data_dir": tmp_path}
        options["drain_grace_s"] = PATIENCE_S
        gateways = [
            await enter(live_gateway(await enter(MemoryBus(broker)), host=host, **options))
            for host in HOSTS
        ]
        places = {
            "127.0.0.11": f"127.0.0.1:{dns_port}",
            "gateway:8000": f"gateway:{port}",
            "8080": str(http_port),
            "8443": str(https_port),
            "/tmp/": f"{tmp_path}/",
            " /tls/": f" {tmp_path}/tls/",
        }
        await enter(nginx(write_config(tmp_path, places), https_port))
        https = httpx.AsyncClient(
            base_url=f"https://localhost:{https_port}", verify=trust, timeout=PATIENCE_S
        )
        plain = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=PATIENCE_S)
        await enter(https)
        await enter(plain)
        yield Proxied(gateways, worker, dns, https, plain)


async def test_each_token_passes_at_once_over_tls(proxied: Proxied) -> None:
    seen = asyncio.Event()

    async def two_words(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await seen.wait()  # the second one follows when the client has the first
        await job.finish("two")

    proxied.worker.script = two_words
    body = ""
    async with (
        asyncio.timeout(PATIENCE_S),
        proxied.https.stream("POST", CHAT, json=chat_body(stream=True)) as answer,
    ):
        async for piece in answer.aiter_text():
            body += piece
            if "one" in body:
                seen.set()

    assert text_of(body) == "one two"


async def test_all_gateways_have_their_share(proxied: Proxied) -> None:
    for _ in range(30):
        assert (await proxied.plain.post(CHAT, json=chat_body())).status_code == 200

    assert min([await gateway.sample(REQUESTS) for gateway in proxied.gateways]) > 0


async def test_another_gateway_takes_what_a_draining_one_refuses(proxied: Proxied) -> None:
    held = asyncio.Event()

    async def wait(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await held.wait()
        await job.finish("two")

    proxied.worker.script = wait
    leaving, response = proxied.gateways[0], {"model": MODEL, "input": "one"}
    async with leaving.http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
        pieces = answer.aiter_text()
        body = await anext(pieces)
        leaving.server.stop()

        async def drains() -> bool:
            return (await leaving.http.get("/health")).status_code == 503

        await eventually(drains)
        proxied.worker.script = repeat_the_prompt
        answers = [
            await proxied.plain.post(path, json=chat_body() if path == CHAT else response)
            for path in (CHAT, "/v1/responses")
            for _ in range(8)
        ]
        held.set()
        body += "".join([piece async for piece in pieces])

    assert [answer.text for answer in answers if answer.status_code != 200] == []
    assert text_of(body) == "one two"


async def test_a_response_is_not_begun_again_after_its_gateway_is_gone(proxied: Proxied) -> None:
    num_taken = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        await reader.readuntil(b"\r\n\r\n")
        num_taken += 1
        writer.close()

    port = int(proxied.gateways[1].url.rpartition(":")[2])
    proxied.dns.addresses = ["127.0.0.3", HOSTS[1]]
    body = {"model": MODEL, "input": "one"}
    statuses: list[int] = []
    async with await asyncio.start_server(die, "127.0.0.3", port), asyncio.timeout(PATIENCE_S):
        while set(statuses) != {200, 502}:  # the proxy resolves the gateways' name at intervals
            answer = await proxied.plain.post("/v1/responses", json=body)
            statuses.append(answer.status_code)

    assert statuses.count(502) == num_taken


async def test_gateways_come_and_go_without_a_reload(proxied: Proxied) -> None:
    proxied.dns.addresses = [HOSTS[1]]

    async def only_the_second_answers() -> bool:
        before = await proxied.gateways[0].sample(REQUESTS)
        for _ in range(6):
            await proxied.plain.post(CHAT, json=chat_body())
        await asyncio.sleep(0.2)
        return await proxied.gateways[0].sample(REQUESTS) == before

    await eventually(only_the_second_answers)


async def test_health_passes_and_metrics_do_not(proxied: Proxied) -> None:
    assert (await proxied.https.get("/health")).json()["status"] == "ok"
    assert (await proxied.https.get("/metrics")).status_code == 404


SPELLINGS = (
    *(
        "/metrics",
        "/metrics/",
        "/metrics//",
        "//metrics",
        "/%6detrics",
        "/metrics%2f",
        "/./metrics",
    ),
    *("/v1/../metrics", "/v1/metrics", "/metrics?x", "/metrics/?x", "/%2fmetrics", "/metrics/%2e"),
)


@pytest.mark.parametrize("headers", [{}, {"content-length": "70000"}], ids=["", "large"])
async def test_no_spelling_of_a_path_leads_to_metrics(
    proxied: Proxied, headers: dict[str, str]
) -> None:
    port = proxied.plain.base_url.port
    assert port is not None
    answers = {path: await raw_head(port, path, headers) for path in SPELLINGS}

    assert {path: answer.split()[1] for path, answer in answers.items()} == dict.fromkeys(
        SPELLINGS, b"404"
    )


async def raw_head(port: int, path: str, headers: dict[str, str]) -> bytes:
    """The head of the answer to a path that is sent as it is written."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    return head


NUM_STRANGERS = 24


async def test_bodies_of_strangers_are_kept_nowhere(proxied: Proxied, tmp_path: Path) -> None:
    """The bodies stop short of their ends, so that each body is kept for as long as possible."""
    port = proxied.plain.base_url.port
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {4 << 20}\r\n\r\n"
    master = int((tmp_path / "nginx.pid").read_text())
    before = num_bytes_of(master)
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        for _ in range(NUM_STRANGERS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(head.encode() + b"x" * (3 << 20))
            await writer.drain()
        held = num_bytes_of(master) - before

    assert temporary_files_of(master) == []
    assert held < 16 << 20, "the bodies have 72 MiB"


async def test_an_error_before_a_body_is_read_reaches_the_client(proxied: Proxied) -> None:
    answer = await proxied.plain.post("/v1/nowhere", content=b"x" * (3 << 20))

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("num_bytes", [10, 59_999, 60_000, 1 << 20])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/batches"])
async def test_bodies_of_any_size_arrive(proxied: Proxied, path: str, num_bytes: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield body[:10]
        yield body[10:]

    body = json.dumps({"model": 1, "metadata": "x" * num_bytes}).encode()
    answers = [
        await proxied.plain.post(path, content=content, headers=JSON)
        for content in (body, pieces())
    ]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert len({answer.text for answer in answers}) == 1


def processes_of(master: int) -> list[Path]:
    children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    return [Path(f"/proc/{pid}") for pid in (master, *children)]


def num_bytes_of(master: int) -> int:
    """The resident memory of nginx."""
    statuses = [(process / "status").read_text() for process in processes_of(master)]
    return sum(
        int(line.split()[1]) << 10
        for one in statuses
        for line in one.splitlines()
        if line.startswith("VmRSS")
    )


def temporary_files_of(master: int) -> list[str]:
    """What nginx has open under its temporary directories; such files have no name any more."""
    links = [
        link.readlink().as_posix()
        for process in processes_of(master)
        for link in (process / "fd").iterdir()
    ]
    return [link for link in links if "/body/" in link or "/proxy/" in link]


async def test_a_body_that_is_too_large_is_refused_in_the_gateways_words(proxied: Proxied) -> None:
    large = chat_body(user="x" * (5 << 20))

    refused = await proxied.https.post(CHAT, json=large)

    assert refused.status_code == 413
    assert refused.json()["error"]["message"]


async def test_a_file_may_be_larger_than_other_bodies(proxied: Proxied) -> None:
    lines = b"{}\n" * (8 << 20)
    files, purpose = {"file": ("large.jsonl", lines)}, {"purpose": "batch"}

    stored = await proxied.https.post("/v1/files", files=files, data=purpose)
    refused = await proxied.https.post(CHAT, content=lines)

    assert (stored.status_code, stored.json()["bytes"]) == (200, len(lines))
    assert refused.status_code == 413
