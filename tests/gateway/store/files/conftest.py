"""Blobs in a directory and in an object store."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.store.files.blobs import Blobs
from tests.gateway.store.files.s3 import BUCKET, running_s3


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
