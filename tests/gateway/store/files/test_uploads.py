import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import update

from gateway.intake.signer import hash_body
from gateway.store.database import Database
from gateway.store.files import records
from gateway.store.files import uploads as uploads_module
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import Files
from gateway.store.files.uploads import LIFETIME_S, UploadRecord, Uploads
from gateway.store.schema import FILES, UPLOADS
from shared.errors import InvalidRequest, NotFound, Unavailable


async def create(uploads: Uploads, num_bytes: int, tenant: str = "a") -> UploadRecord:
    return await uploads.create(
        tenant, filename="in.jsonl", purpose="batch", num_bytes=num_bytes, kept_s=7200
    )


async def add(uploads: Uploads, upload: UploadRecord, data: bytes) -> str:
    async with uploads.writing_part(upload.tenant, upload.id) as draft:
        await draft.write(data)
    return draft.id


async def complete(
    uploads: Uploads, upload: UploadRecord, *part_ids: str, md5: str | None = None
) -> UploadRecord:
    body_hash = hash_body(repr((part_ids, md5)).encode())
    return await uploads.complete(upload.tenant, upload.id, part_ids, md5=md5, body_hash=body_hash)


async def read(files: Files, upload: UploadRecord) -> bytes:
    assert upload.file_id is not None
    return b"".join([part async for part in files.content(upload.file_id)])


async def let_expire(database: Database, upload: UploadRecord, ago_s: float) -> None:
    statement = update(UPLOADS).where(UPLOADS.c.id == upload.id)
    async with database.begin() as connection:
        await connection.execute(statement.values(expires_at=int(time.time() - ago_s)))


async def num_bytes(files: Files, tenant: str) -> int:
    return sys.maxsize - await files.bytes_left(tenant)


def stored(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "files").iterdir()]


async def test_a_file_is_its_parts_in_the_order_asked_for(
    files: Files, uploads: Uploads, tmp_path: Path
) -> None:
    upload = await create(uploads, 9)
    second, first, unused = [
        await add(uploads, upload, data) for data in (b"-second", b"1-", b"unused")
    ]
    assert await num_bytes(files, "a") == 15

    done = await complete(uploads, upload, first, second)

    assert (done.status, await read(files, done)) == ("completed", b"1--second")
    file = await files.get("a", done.file_id or "")
    assert (file.filename, file.purpose, file.num_bytes) == ("in.jsonl", "batch", 9)
    assert file.expires_at == pytest.approx(file.created_at + 7200, abs=60)
    assert await num_bytes(files, "a") == 9
    await files.sweep()
    assert stored(tmp_path) == [file.id]
    with pytest.raises(NotFound):
        await files.get("a", unused)


async def test_the_digest_is_of_the_bytes_in_their_order(files: Files, uploads: Uploads) -> None:
    upload = await create(uploads, 8)
    one, two = [await add(uploads, upload, data) for data in (b"one-", b"two-")]
    md5 = hashlib.md5(b"one-two-", usedforsecurity=False).hexdigest()

    with pytest.raises(InvalidRequest, match="md5"):
        await complete(uploads, upload, two, one, md5=md5)
    done = await complete(uploads, upload, one, two, md5=md5.upper())

    assert await read(files, done) == b"one-two-"


async def test_parts_are_those_of_the_upload_and_have_its_size(uploads: Uploads) -> None:
    upload, other = await create(uploads, 4), await create(uploads, 4)
    mine, more = [await add(uploads, upload, data) for data in (b"mine", b"more")]
    foreign = await add(uploads, other, b"them")

    for part_id in (foreign, "part_\x00"):
        with pytest.raises(InvalidRequest, match="no part"):
            await complete(uploads, upload, part_id)
    for part_ids in ((), (mine, more)):
        with pytest.raises(InvalidRequest, match="bytes together"):
            await complete(uploads, upload, *part_ids)

    assert (await complete(uploads, upload, mine)).status == "completed"


async def test_a_repeated_completion_returns_the_same_file(files: Files, uploads: Uploads) -> None:
    upload = await create(uploads, 4)
    part = await add(uploads, upload, b"part")

    done = await asyncio.gather(*(complete(uploads, upload, part) for _ in range(4)))

    assert len({one.file_id for one in done}) == 1
    assert len(await files.page("a", purpose=None, after=None, limit=9, newest_first=True)) == 1
    with pytest.raises(InvalidRequest, match="completed"):
        await complete(uploads, upload, part, md5="0" * 32)


class _SlowBlobs(Blobs):
    """Counts the blobs that are read at once."""

    num_reading = most_reading = 0
    both: asyncio.Barrier | None = None
    """If it is set, a blob is read once another one is read beside it."""

    async def parts(
        self, name: str, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        if self.both is not None:
            await self.both.wait()
        else:
            await asyncio.sleep(0.05)
        async for part in super().parts(name, start, end):
            yield part
        self.num_reading -= 1


async def test_one_copy_of_an_upload_is_made_at_a_time(database: Database, tmp_path: Path) -> None:
    blobs = _SlowBlobs.in_directory(tmp_path / "files")
    files = Files(database, blobs)
    uploads = Uploads(database, files, max_bytes=1000)
    upload, other = await create(uploads, 4), await create(uploads, 4)
    part, other_part = [await add(uploads, one, b"part") for one in (upload, other)]
    digests = [str(k) * 32 for k in range(4)]

    done = await asyncio.gather(
        *(complete(uploads, upload, part, md5=md5) for md5 in digests), return_exceptions=True
    )

    assert [type(error) for error in done] == [InvalidRequest] * 4
    assert blobs.most_reading == 1
    blobs.both = asyncio.Barrier(2)
    await asyncio.gather(complete(uploads, upload, part), complete(uploads, other, other_part))
    assert blobs.most_reading == 2


async def test_a_tenant_sees_its_own_uploads_only(uploads: Uploads) -> None:
    upload = await create(uploads, 1, tenant="a")

    with pytest.raises(NotFound):
        await uploads.get("b", upload.id)
    with pytest.raises(NotFound):
        await uploads.cancel("b", upload.id)
    with pytest.raises(NotFound):
        await uploads.complete("b", upload.id, [], body_hash="")
    with pytest.raises(NotFound):
        async with uploads.writing_part("b", upload.id):
            pass


async def test_a_cancelled_upload_takes_nothing(
    files: Files, uploads: Uploads, tmp_path: Path
) -> None:
    upload = await create(uploads, 4)
    part = await add(uploads, upload, b"part")

    assert (await uploads.cancel("a", upload.id)).status == "cancelled"

    assert (await uploads.cancel("a", upload.id)).status == "cancelled"
    with pytest.raises(InvalidRequest, match="cancelled"):
        await add(uploads, upload, b"more")
    with pytest.raises(InvalidRequest, match="cancelled"):
        await complete(uploads, upload, part)
    await files.sweep()
    assert stored(tmp_path) == []


class _EndingBlobs(Blobs):
    """Cancel the upload whose parts are read, and delete nothing."""

    uploads: Uploads
    upload: UploadRecord

    async def parts(
        self, name: str, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        await self.uploads.cancel(self.upload.tenant, self.upload.id)
        async for part in super().parts(name, start, end):
            yield part

    async def delete(self, name: str) -> None:
        raise Unavailable("no storage")


async def test_an_upload_that_ends_during_its_completion_says_so_if_its_copy_cannot_be_removed(
    database: Database, tmp_path: Path
) -> None:
    blobs = _EndingBlobs.in_directory(tmp_path / "files")
    blobs.uploads = uploads = Uploads(database, Files(database, blobs), max_bytes=1000)
    blobs.upload = upload = await create(uploads, 4)
    part = await add(uploads, upload, b"part")

    with pytest.raises(InvalidRequest, match="cancelled"):
        await complete(uploads, upload, part)


async def test_a_part_that_comes_after_the_end_leaves_nothing(
    uploads: Uploads, tmp_path: Path
) -> None:
    upload = await create(uploads, 4)

    async def add_late() -> None:
        async with uploads.writing_part("a", upload.id) as draft:
            await draft.write(b"part")
            await uploads.cancel("a", upload.id)

    with pytest.raises(InvalidRequest, match="cancelled"):
        await add_late()

    assert stored(tmp_path) == []


async def test_the_parts_of_an_upload_are_limited_together(
    uploads: Uploads, tmp_path: Path
) -> None:
    upload = await create(uploads, 1000)
    part = await add(uploads, upload, bytes(999))

    with pytest.raises(InvalidRequest, match="at most 1000 bytes"):
        await add(uploads, upload, bytes(2))

    assert stored(tmp_path) == [part]


async def test_parts_are_limited_with_the_tenants_files(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_FILES", 1)
    upload = await create(uploads, 4)
    part = await add(uploads, upload, b"part")

    with pytest.raises(InvalidRequest, match="at most 1 files"):
        await add(uploads, upload, b"more")

    assert stored(tmp_path) == [part]


async def test_the_uploads_of_a_tenant_are_limited(
    database: Database, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "MAX_UPLOADS", 2)
    first = await create(uploads, 1)
    await uploads.cancel("a", (await create(uploads, 1)).id)

    with pytest.raises(InvalidRequest, match="at most 2 uploads"):
        await create(uploads, 1)

    await create(uploads, 1, tenant="b")
    await let_expire(database, first, ago_s=48 * 3600)
    await uploads.sweep()
    await create(uploads, 1)


async def test_a_part_is_in_the_file_once(uploads: Uploads) -> None:
    upload = await create(uploads, 8)
    part = await add(uploads, upload, b"part")

    with pytest.raises(InvalidRequest, match="each part once"):
        await complete(uploads, upload, part, part)


async def test_what_is_uploaded_to_several_gateways_at_the_same_time_is_limited_together(
    database: Database, tmp_path: Path
) -> None:
    blobs = Blobs.in_directory(tmp_path / "files")
    files, other_files = [Files(database, blobs, max_tenant_bytes=10) for _ in range(2)]
    uploads = Uploads(database, other_files, max_bytes=1000)
    upload = await create(uploads, 6)

    async with files.writing("a") as first:  # both have been told that there is room
        await first.write(bytes(6))
        await add(uploads, upload, bytes(4))
        late = uploads.writing_part("a", upload.id)
        draft = await late.__aenter__()
        await draft.write(b"1")
    with pytest.raises(InvalidRequest, match="total size limit"):
        await late.__aexit__(None, None, None)
    with pytest.raises(InvalidRequest, match="total size limit"):
        async with files.writing("a") as second:
            await second.write(b"1")
    async with files.writing("b") as other:
        await other.write(bytes(10))

    with pytest.raises(InvalidRequest, match="total size limit"):
        await files.bytes_left("a")
    assert len(stored(tmp_path)) == 3


async def test_what_is_being_uploaded_takes_room_until_it_ends(
    database: Database, tmp_path: Path
) -> None:
    files = Files(database, Blobs.in_directory(tmp_path / "files"), max_tenant_bytes=10)
    uploads = Uploads(database, files, max_bytes=1000)
    upload = await create(uploads, 6)
    await add(uploads, upload, b"1")

    async def write(num_bytes: int) -> None:
        async with files.writing("a") as draft:
            await draft.write(bytes(num_bytes))

    assert await files.bytes_left("a") == 9
    with suppress(ZeroDivisionError):
        async with uploads.writing_part("a", upload.id) as part:
            await part.write(bytes(4))
            assert await files.bytes_left("a") == 5
            with pytest.raises(InvalidRequest, match="total size limit"):
                await write(6)
            await part.write(bytes(5))
            with pytest.raises(InvalidRequest, match="total size limit"):
                await files.bytes_left("a")
            assert await files.bytes_left("b") == 10
            async with files.writing("a", is_hidden=True) as output:
                await output.write(bytes(20))
            raise ZeroDivisionError

    assert await files.bytes_left("a") == 9
    await write(9)


@pytest.mark.parametrize("is_part", [False, True])
async def test_what_has_been_uploaded_takes_room_at_once(
    database: Database, tmp_path: Path, is_part: bool
) -> None:
    files = Files(database, Blobs.in_directory(tmp_path / "files"), max_tenant_bytes=10)
    uploads = Uploads(database, files, max_bytes=1000)
    upload = await create(uploads, 6)

    async with files.writing("a") as late:
        await late.write(b"1")
        if is_part:
            await add(uploads, upload, bytes(6))
        else:
            async with files.writing("a") as file:
                await file.write(bytes(6))
        await late.write(bytes(3))
        with pytest.raises(InvalidRequest, match="total size limit"):
            await late.write(b"1")


async def test_an_expired_upload_is_swept_with_its_parts(
    database: Database, files: Files, uploads: Uploads, tmp_path: Path
) -> None:
    upload, kept = await create(uploads, 4), await create(uploads, 4)
    part, kept_part = [await add(uploads, one, b"part") for one in (upload, kept)]
    assert upload.expires_at == upload.created_at + LIFETIME_S
    await let_expire(database, upload, ago_s=1)

    with pytest.raises(InvalidRequest, match="expired"):
        await complete(uploads, upload, part)
    with pytest.raises(InvalidRequest, match="expired"):
        await uploads.cancel("a", upload.id)
    await let_expire(database, upload, ago_s=48 * 3600)
    await uploads.sweep()
    await files.sweep()

    with pytest.raises(NotFound):
        await uploads.get("a", upload.id)
    assert stored(tmp_path) == [kept_part]


async def test_what_a_gateway_left_half_done_is_removed_and_the_upload_goes_on(
    database: Database, files: Files, uploads: Uploads, tmp_path: Path
) -> None:
    upload = await create(uploads, 4)
    one = await add(uploads, upload, b"on")
    with suppress(ZeroDivisionError):
        async with uploads.writing_part("a", upload.id) as draft:
            await draft.write(b"half a part")
            raise ZeroDivisionError
    # A process that dies while it completes the upload leaves a hidden file.
    async with files.writing("a", is_hidden=True) as copy:
        await copy.write(b"half a copy")
    async with database.begin() as connection:
        statement = update(FILES).where(FILES.c.id == copy.id)
        await connection.execute(statement.values(created_at=int(time.time()) - 48 * 3600))

    two = await add(uploads, upload, b"e!")
    await files.sweep()
    done = await complete(uploads, upload, one, two)

    assert await read(files, done) == b"one!"
    await files.sweep()
    assert stored(tmp_path) == [done.file_id]
