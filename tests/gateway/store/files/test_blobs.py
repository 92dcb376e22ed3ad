from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.store.files.blobs import Blobs
from shared.errors import StartupError, Unavailable
from tests.gateway.store.files.s3 import BUCKET, running_s3

LONG = bytes(range(256)) * 50_000
"""More than two parts of an upload."""


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with running_s3() as variables:
        yield variables


@pytest.fixture(params=["directory", "s3"])
async def blobs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Blobs]:
    """The same tests for each kind of storage."""
    if request.param == "directory":
        yield Blobs.in_directory(tmp_path / "new" / "files")
        return
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    yield Blobs.at(f"s3://{BUCKET}/a/prefix")


async def write(blobs: Blobs, name: str, *parts: bytes) -> int:
    async with blobs.writer(name) as writer:
        for part in parts:
            await writer.write(part)
    return writer.num_bytes


async def read(blobs: Blobs, name: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([part async for part in blobs.parts(name, start, end)])


@pytest.mark.parametrize("parts", [(), (b"",), (b"one", b"", b"two"), (LONG, b"end")])
async def test_a_blob_is_what_was_written(blobs: Blobs, parts: tuple[bytes, ...]) -> None:
    content = b"".join(parts)

    assert await write(blobs, "name", *parts) == len(content)

    assert await read(blobs, "name") == content


async def test_a_range_is_read_alone(blobs: Blobs) -> None:
    await write(blobs, "name", LONG)

    assert await read(blobs, "name", 255, 258) == b"\xff\x00\x01"
    assert await read(blobs, "name", 5, 5) == b""


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


async def test_a_storage_that_refuses_is_unavailable(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    blobs = Blobs.at("s3://no-such-bucket")

    with pytest.raises(Unavailable):
        await write(blobs, "name", b"content")


def test_other_urls_are_refused() -> None:
    with pytest.raises(StartupError, match="URL of files"):
        Blobs.at("gopher://host/path")
