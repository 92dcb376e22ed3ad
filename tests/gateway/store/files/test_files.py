import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.batches import Batches, Order
from gateway.store.database import Database
from gateway.store.files import records
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import FileRecord, Files
from gateway.store.schema import FILES
from shared.errors import InvalidRequest, NotFound, Unavailable


async def write(
    files: Files,
    content: bytes = b"content",
    *,
    tenant: str = "a",
    purpose: str = "batch",
    expires_at: int | None = None,
) -> FileRecord:
    async with files.writing(tenant, "name.jsonl", purpose) as draft:
        draft.expires_at = expires_at
        await draft.write(content)
    return draft.record


async def read(files: Files, file: FileRecord, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([part async for part in files.content(file.id, start, end)])


async def num_bytes(files: Files, tenant: str) -> int:
    return sys.maxsize - await files.bytes_left(tenant)


def stored(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "files").iterdir()]


def block(tmp_path: Path, file_id: str) -> None:
    """Make it impossible to remove a file."""
    (tmp_path / "files" / file_id).unlink()
    (tmp_path / "files" / file_id).mkdir()


async def test_a_file_is_what_was_written(files: Files) -> None:
    content = bytes(range(256)) * 50_000  # more than a part

    file = await write(files, content)

    assert (file.num_bytes, file.filename, file.purpose) == (len(content), "name.jsonl", "batch")
    assert await files.get("a", file.id) == file
    assert await read(files, file) == content
    assert await read(files, file, 255, 258) == b"\xff\x00\x01"


async def test_an_empty_file_is_a_file(files: Files) -> None:
    file = await write(files, b"")

    assert file.num_bytes == 0
    assert await read(files, file) == b""


async def test_a_tenant_sees_its_own_files_only(files: Files) -> None:
    file = await write(files, tenant="a")

    with pytest.raises(NotFound):
        await files.get("b", file.id)
    with pytest.raises(NotFound):
        await files.delete("b", file.id)
    assert await files.page("b", purpose=None, after=None, limit=9, newest_first=True) == []
    assert (await num_bytes(files, "a"), await num_bytes(files, "b")) == (7, 0)


async def test_no_id_has_the_character_that_postgresql_cannot_hold(files: Files) -> None:
    with pytest.raises((NotFound, InvalidRequest)):
        await files.get("a", "file-\x00")


async def test_the_files_of_a_tenant_are_limited_however_small(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_FILES", 2)
    kept = [await write(files, b"") for _ in range(2)]

    with pytest.raises(InvalidRequest, match="at most 2 files"):
        await files.bytes_left("a")
    with pytest.raises(InvalidRequest, match="at most 2 files"):
        await write(files, b"")

    assert len(stored(tmp_path)) == 2
    await write(files, b"", tenant="b")
    await files.delete("a", kept[0].id)
    await write(files, b"")


async def test_pages_contain_each_file_once(files: Files) -> None:
    written = {(await write(files)).id for _ in range(5)}
    await write(files, purpose="batch_output")

    seen: list[str] = []
    for newest_first in (True, False):
        after = None
        while page := await files.page(
            "a", purpose="batch", after=after, limit=2, newest_first=newest_first
        ):
            seen += [file.id for file in page]
            after = seen[-1]

    assert set(seen) == written
    assert seen[:5] == seen[:4:-1]


async def test_nothing_is_left_of_an_upload_that_fails(files: Files, tmp_path: Path) -> None:
    with suppress(ZeroDivisionError):
        async with files.writing("a") as draft:
            await draft.write(b"half of it")
            raise ZeroDivisionError

    with pytest.raises(NotFound):
        await files.get("a", draft.id)
    assert stored(tmp_path) == []


async def test_an_error_is_not_replaced_by_that_of_the_removal_which_is_made_up_for(
    files: Files, tmp_path: Path
) -> None:
    async def write_and_fail() -> None:
        async with files.writing("a") as draft:
            (tmp_path / "files" / draft.id).mkdir()  # no file, and cannot be removed like one
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write_and_fail()

    (left,) = stored(tmp_path)
    (tmp_path / "files" / left).rmdir()
    (tmp_path / "files" / left).touch()
    await files.sweep()
    assert stored(tmp_path) == []


async def test_nothing_is_left_of_an_upload_that_was_swept_before_it_ended(
    database: Database,
) -> None:
    store = MemoryStore()  # a sweep of a directory also removes what is half written
    files = Files(database, Blobs(store))

    async def write_slowly() -> None:
        async with files.writing("a") as draft:
            await draft.write(b"content")
            began = update(FILES).where(FILES.c.id == draft.id)
            async with database.begin() as connection:
                await connection.execute(began.values(created_at=int(time.time()) - 48 * 3600))
            await files.sweep()

    with pytest.raises(Unavailable, match="took so long"):
        await write_slowly()

    assert store.list().collect() == []


class _LosingDatabase(Database):
    """Loses the confirmation of a commit, if told so, and may be away from then on."""

    loses = stays_away = is_away = False

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        if self.is_away:
            raise Unavailable("no database")
        async with super().begin() as connection:
            yield connection
        if self.loses:
            self.loses, self.is_away = False, self.stays_away
            raise Unavailable("no confirmation")


@pytest.fixture
async def losing(database_url: str | None, tmp_path: Path) -> AsyncIterator[_LosingDatabase]:
    database = await _LosingDatabase.open(database_url, tmp_path)
    yield database
    await database.close()


@pytest.mark.parametrize("stays_away", [False, True])
async def test_a_file_whose_commit_was_not_confirmed_is_gone_or_whole(
    losing: _LosingDatabase, tmp_path: Path, stays_away: bool
) -> None:
    files = Files(losing, Blobs.in_directory(tmp_path / "files"))
    losing.stays_away = stays_away

    async def write_unconfirmed() -> None:
        async with files.writing("a") as draft:
            await draft.write(b"content")
            draft.expires_at = int(time.time()) + 1000
            losing.loses = True

    with pytest.raises(Unavailable, match="no confirmation"):
        await write_unconfirmed()
    listed = await files.page("a", purpose=None, after=None, limit=9, newest_first=True)
    contents = [await read(files, file) for file in listed]
    losing.is_away = False
    await files.sweep()

    assert contents == ([b"content"] if stays_away else [])
    assert stored(tmp_path) == [file.id for file in listed]


async def test_a_deleted_file_is_gone(files: Files, tmp_path: Path) -> None:
    file = await write(files)

    await files.delete("a", file.id)

    with pytest.raises(NotFound):
        await files.get("a", file.id)
    assert stored(tmp_path) == []


async def test_a_file_is_deleted_even_if_its_bytes_cannot_be_removed_yet(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = await write(files)
    block(tmp_path, file.id)

    await files.delete("a", file.id)

    with pytest.raises(NotFound):
        await files.get("a", file.id)
    assert "file storage unavailable" in caplog.text
    assert stored(tmp_path) == [file.id]
    (tmp_path / "files" / file.id).rmdir()
    (tmp_path / "files" / file.id).touch()
    await files.sweep()
    assert stored(tmp_path) == []


async def test_an_expired_file_is_hidden_and_then_removed(files: Files, tmp_path: Path) -> None:
    file = await write(files, expires_at=int(time.time()) - 1)
    kept = await write(files, expires_at=int(time.time()) + 1000)

    with pytest.raises(NotFound):
        await files.get("a", file.id)
    await files.sweep()

    assert stored(tmp_path) == [kept.id]


async def test_a_file_that_cannot_be_removed_holds_up_no_other(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.store.files.records._MAX_SWEPT", 1)
    written = [await write(files, expires_at=int(time.time()) - 1) for _ in range(3)]
    stuck = min(file.id for file in written)
    block(tmp_path, stuck)

    await files.sweep()

    assert stored(tmp_path) == [stuck]
    assert caplog.text.count("files not removed, retrying later") == 1
    (tmp_path / "files" / stuck).rmdir()
    await files.sweep()
    assert await num_bytes(files, "a") == 0


async def test_the_input_of_a_batch_is_kept_until_it_ends(files: Files, batches: Batches) -> None:
    file = await write(files)
    await batches.create("a", Order("/v1/completions", file.id, "24h", 86400))
    claimed = await batches.claim({}, 60)
    assert claimed is not None

    with pytest.raises(InvalidRequest, match="has not ended"):
        await files.delete("a", file.id)

    await batches.fail(claimed.id, claimed.fence, [])
    await files.delete("a", file.id)
