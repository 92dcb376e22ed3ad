import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from gateway.store.files import blobs as blobs_module
from gateway.store.files.blobs import Blobs
from shared.bus.memory import MemoryBus
from shared.errors import StartupError, Unavailable
from tests.gateway.store.files.s3 import BUCKET
from tests.support.gateway.batches import chat, ended, order, output, texts
from tests.support.gateway.http import eventually, live_gateway
from tests.support.network.connections import serving
from tests.support.workers.scripted_worker import ScriptedWorker

LONG = bytes(range(256)) * 50_000
"""More than two parts of an upload."""


async def write(blobs: Blobs, name: str, *parts: bytes) -> int:
    async with blobs.writer(name) as writer:
        for part in parts:
            await writer.write(part)
    return writer.num_bytes


async def read(blobs: Blobs, name: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([part async for part in blobs.parts(name, start, end)])


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("parts", [(), (b"",), (b"one", b"", b"two"), (LONG, b"end")])
async def test_a_blob_is_what_was_written(blobs: Blobs, parts: tuple[bytes, ...]) -> None:
    content = b"".join(parts)

    assert await write(blobs, "name", *parts) == len(content)

    assert await read(blobs, "name") == content


async def test_a_range_is_read_alone(blobs: Blobs) -> None:
    await write(blobs, "name", LONG)

    assert await read(blobs, "name", 255, 258) == b"\xff\x00\x01"
    assert await read(blobs, "name", 5, 5) == b""
    assert await read(blobs, "name", 256) == LONG[256:]
    assert await read(blobs, "name", 256, len(LONG) + 1) == LONG[256:]


class _Store(BaseHTTPRequestHandler):
    """An object store that has `LONG` under each name, and counts the requests that are open."""

    num_open = 0

    def do_HEAD(self) -> None:
        self._begin(0, len(LONG))

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        start, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(LONG))
        _Store.num_open += 1
        try:
            self._begin(start, end)
            self.wfile.write(LONG[start:end])
        finally:
            _Store.num_open -= 1

    def _begin(self, start: int, end: int) -> None:
        is_whole = end - start == len(LONG)
        self.send_response(200 if is_whole else 206)
        self.send_header("content-length", str(end - start))
        if not is_whole:
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(LONG)}")
        self.send_header("etag", '"1"')
        self.send_header("last-modified", "Sun, 29 Nov 2026 12:00:00 GMT")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


async def test_no_request_is_open_while_a_reader_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_is_open() -> bool:
        return _Store.num_open == 0

    content = b""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Store) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        in_environment(monkeypatch, server.server_port)
        async for part in Blobs.at("s3://bucket").parts("name"):
            content += part
            await eventually(none_is_open)
        server.shutdown()
        thread.join()

    assert content == LONG


def in_environment(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let clients of S3 find a server at this port."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


async def test_nothing_is_left_of_a_writer_that_fails(blobs: Blobs) -> None:
    with suppress(ZeroDivisionError):
        async with blobs.writer("name") as writer:
            await writer.write(LONG)
            raise ZeroDivisionError

    with pytest.raises(FileNotFoundError):
        await read(blobs, "name")


async def test_a_deleted_blob_is_gone(blobs: Blobs) -> None:
    await write(blobs, "name", b"content")

    await blobs.delete("name")
    await blobs.delete("name")

    with pytest.raises(FileNotFoundError):
        await read(blobs, "name")


async def test_what_a_killed_writer_has_left_is_deleted_with_the_blob(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, signal
from pathlib import Path
from gateway.store.files.blobs import Blobs

async def write():
    async with Blobs.in_directory(Path({str(tmp_path)!r})).writer("name") as writer:
        while not any(Path({str(tmp_path)!r}).iterdir()):
            await writer.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(write())
"""
    writing = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await writing.wait() == -signal.SIGKILL
    left = names(tmp_path)

    await Blobs.in_directory(tmp_path).delete("name")

    assert left == ["name#1"]
    assert names(tmp_path) == []


async def test_a_blob_in_a_directory_is_on_the_disk_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)

    await write(Blobs.in_directory(tmp_path), "name", b"content")

    assert synced == [tmp_path / "name", tmp_path]


async def test_a_storage_that_refuses_is_unavailable(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    blobs = Blobs.at("s3://no-such-bucket")

    with pytest.raises(Unavailable):
        await write(blobs, "name", b"content")


@pytest.mark.parametrize(
    "use",
    [
        lambda blobs: blobs.delete("name"),
        lambda blobs: read(blobs, "name"),
        lambda blobs: write(blobs, "name", LONG),
    ],
    ids=["delete", "read", "write"],
)
async def test_a_storage_that_sends_nothing_is_given_up(
    silent_s3: list[str], monkeypatch: pytest.MonkeyPatch, use: Callable[[Blobs], Awaitable[object]]
) -> None:
    monkeypatch.setattr(blobs_module, "_READ_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(blobs_module, "_RETRY_TIMEOUT", timedelta(seconds=0.1))
    blobs = Blobs.at("s3://bucket")

    async def is_asked() -> bool:
        return bool(silent_s3)

    with pytest.raises(Unavailable):
        await use(blobs)

    await eventually(is_asked)  # it may not have been scheduled until now
    assert len(silent_s3) == 1


@pytest.fixture
async def silent_s3(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """The requests to the S3 server of the environment, which sends nothing."""
    requests: list[str] = []

    async def read_all(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        requests.append((await reader.readline()).decode())
        await reader.read()

    async with serving(read_all) as port:
        in_environment(monkeypatch, port)
        yield requests


def test_a_request_may_take_minutes_if_bytes_arrive_within_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: dict[str, Any] = {}

    def record(_: str, **options: Any) -> MemoryStore:
        passed.update(options)
        return MemoryStore()

    monkeypatch.setattr(blobs_module, "from_url", record)

    Blobs.at("s3://bucket")

    assert passed["client_options"] == {
        "timeout": timedelta(minutes=10),
        "read_timeout": timedelta(seconds=30),
    }
    assert passed["retry_config"] == {"retry_timeout": timedelta(seconds=30)}


async def test_credentials_can_be_read_from_a_file(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ["[default]"]
    for name, value in s3.items():
        monkeypatch.delenv(name, raising=False)
        lines.append(f"{name.lower()} = {value}")
    (tmp_path / "credentials").write_text("\n".join(lines))

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    blobs = Blobs.at(f"s3://{BUCKET}/a/file")
    await write(blobs, "name", b"content")

    assert await read(blobs, "name") == b"content"


@pytest.mark.parametrize(
    "text", ["", "aws_access_key_id = ID", "[other]\na = b", "[default]\nsecret"]
)
def test_a_file_without_credentials_is_refused_and_not_quoted(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").write_text(text)

    with pytest.raises(StartupError, match=r"no section \[default\]") as caught:
        Blobs.at("s3://bucket")

    assert "secret" not in str(caught.value).removeprefix(str(tmp_path))


def test_other_urls_are_refused() -> None:
    with pytest.raises(StartupError, match="URL of files"):
        Blobs.at("gopher://host/path")


async def test_input_and_output_of_a_batch_may_be_in_an_object_store(
    bus: MemoryBus,
    worker: ScriptedWorker,
    s3: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/batches"
    async with live_gateway(bus, data_dir=tmp_path, files_url=url) as gateway:
        batch = await ended(gateway, await order(gateway, [chat(str(k)) for k in range(5)]))
        answers = await output(gateway, batch.output_file_id)

    assert list(texts(answers)) == [str(k) for k in range(5)]
    assert not (tmp_path / "files").exists()
