"""Files on their way through a gateway in a process of its own: their bytes are not kept. Slow
clients, with short times."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import Message

from gateway.intake import multipart
from gateway.intake.multipart import read_form
from tests.support.gateway.lone_gateway import lone_gateway, peak_memory_bytes

MIB = 1 << 20
WARM_UP_BYTES = 16 * MIB
"""More than what is on its way to the storage at a time: three parts of 5 MiB, on a slow disk."""
NUM_WARM_UPS = 4
"""Each of several threads takes memory of its own when it writes for the first time."""
FILE_BYTES = 128 * MIB
MAX_GROWTH_BYTES = FILE_BYTES // 8
_LINE = b'{"custom_id": "1", "method": "POST"}'.ljust(1023) + b"\n"
_BOUNDARY = "boundary"


def form(field: str, num_bytes: int) -> Iterator[bytes]:
    """A form with a file, which is made while it is sent."""
    head = f'Content-Disposition: form-data; name="{field}"; filename="in.jsonl"'
    purpose = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
    yield f"--{_BOUNDARY}\r\n{purpose}\r\n--{_BOUNDARY}\r\n{head}\r\n\r\n".encode()
    for _ in range(num_bytes // MIB):
        yield _LINE * 1024
    yield f"\r\n--{_BOUNDARY}--\r\n".encode()


def sent(client: httpx.Client, path: str, field: str, num_bytes: int) -> str:
    """The id of what was made of a form."""
    headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    response = client.post(path, content=form(field, num_bytes), headers=headers)
    return str(response.raise_for_status().json()["id"])


def send_file(client: httpx.Client, num_bytes: int) -> str:
    return sent(client, "/v1/files", "file", num_bytes)


def send_parts(client: httpx.Client, num_bytes: int) -> str:
    order = {
        "bytes": num_bytes,
        "filename": "in.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
    }
    upload = client.post("/v1/uploads", json=order).raise_for_status().json()
    path = f"/v1/uploads/{upload['id']}"
    num_parts = num_bytes // WARM_UP_BYTES
    part_ids = [sent(client, f"{path}/parts", "data", WARM_UP_BYTES) for _ in range(num_parts)]
    done = client.post(f"{path}/complete", json={"part_ids": part_ids}).raise_for_status().json()
    return str(done["file"]["id"])


@pytest.mark.parametrize("send", [send_file, send_parts])
def test_a_file_takes_less_memory_than_an_eighth_of_its_size(
    send: Callable[[httpx.Client, int], str], tmp_path: Path
) -> None:
    data_dir = {"WARREN_DATA_DIR": str(tmp_path / "data")}
    with (
        lone_gateway(tmp_path / "log", **data_dir) as process,
        httpx.Client(base_url=process.url, timeout=None) as client,
    ):
        for _ in range(NUM_WARM_UPS):
            send(client, WARM_UP_BYTES)
        before = peak_memory_bytes(process)

        file_id = send(client, FILE_BYTES)

        grown = peak_memory_bytes(process) - before
        assert client.get(f"/v1/files/{file_id}").json()["bytes"] == FILE_BYTES
        assert grown < MAX_GROWTH_BYTES


class Clock:
    """The time of the event loop and of the program, which passes in pauses alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self._now)

    async def pause(self, seconds: float) -> None:
        self._now += seconds
        for _ in range(5):  # for the timers that are due
            await asyncio.sleep(0)


async def receive_slowly(
    clock: Clock, num_bytes: int, pause_s: float, storage_s: float = 0.0
) -> int:
    """Receive a file of ``num_bytes`` in 20 pieces, each after a pause of the client and before a
    pause of the storage; returns how much arrived."""
    body = b"".join(form("file", 0)).partition(b"\r\n--boundary--")
    pieces = [body[0], *[bytes(num_bytes // 20)] * 20, body[1] + body[2]]
    arrived = 0

    async def receive() -> Message:
        await clock.pause(pause_s)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def take(_: str, data: bytes) -> None:
        nonlocal arrived
        arrived += len(data)
        await clock.pause(storage_s)

    headers = [(b"content-type", f"multipart/form-data; boundary={_BOUNDARY}".encode())]
    await read_form(Request({"type": "http", "headers": headers}, receive), MIB, take)
    return arrived


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "_IDLE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(multipart, "_MIN_BYTES_PER_S", 1000)


@pytest.mark.usefixtures("short_times")
async def test_a_form_that_arrives_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HTTPException) as caught:
        await receive_slowly(Clock(monkeypatch), 20, pause_s=0.05)

    assert caught.value.status_code == 408


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize(
    ("num_bytes", "pause_s", "storage_s"),
    [(20_000, 0.05, 0.0), (20, 0.0, 0.05)],
    ids=["client", "storage"],
)
async def test_a_form_may_take_its_time(
    num_bytes: int, pause_s: float, storage_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    assert await receive_slowly(clock, num_bytes, pause_s, storage_s) == num_bytes
