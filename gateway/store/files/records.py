"""Files: their records in the database, and their bytes in the blobs.

A record is written before the first byte and removed after the last byte, so that a process that
dies leaves no bytes behind: `sweep` removes unfinished, deleted and expired files.
"""

import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from sqlalchemy import and_, delete, exists, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database, uncancelled
from gateway.store.files.blobs import Blobs, BlobWriter
from gateway.store.files.free_space import FreeSpace
from gateway.store.schema import BATCHES, FILES, UNENDED, UPLOADS
from shared.errors import InvalidRequest, NotFound, Unavailable

logger = logging.getLogger(__name__)

_UPLOAD_TIMEOUT_S = 24 * 3600
_COMPLETION_TIMEOUT_S = 3600
"""Parts are kept so much longer than their upload, which may just be completed."""
MAX_FILES = 100_000
"""Files of a tenant, including the parts of its uploads. Even an empty file takes a row and an
inode."""
_MAX_SWEPT = 100
_TOO_LARGE = "The tenant's files exceed their total size limit."
_ROOM_LOCK = 0x46494C45
"""Any number; the locks with two numbers are separate from the locks with one number."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None


@dataclass(slots=True)
class Draft:
    """A file that is being written."""

    id: str
    tenant: str
    writer: BlobWriter
    hold: Callable[[int], Awaitable[None]]
    """Takes the tenant's room for bytes that are about to be written. Raises `InvalidRequest`, and
    `Unavailable` if the disk is nearly full."""
    filename: str
    purpose: str
    expires_at: int | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))

    async def write(self, data: bytes) -> None:
        """Raises `Unavailable`, and `InvalidRequest` if the tenant has no room for them."""
        await self.hold(len(data))
        await self.writer.write(data)

    @property
    def record(self) -> FileRecord:
        """The file, after the block of `Files.writing`."""
        return FileRecord(
            self.id,
            self.tenant,
            self.filename,
            self.purpose,
            self.writer.num_bytes,
            self.created_at,
            self.expires_at,
        )


_COLUMNS = tuple(FILES.c[field.name] for field in fields(FileRecord))
_IN_USE = exists().where(BATCHES.c.input_file_id == FILES.c.id, BATCHES.c.status.in_(UNENDED))
_IS_PART = FILES.c.state == "part"


class Files:
    """The files of all tenants. Every method raises `Unavailable`."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        *,
        max_tenant_bytes: int = sys.maxsize,
        space: FreeSpace | None = None,
    ) -> None:
        """The files that a tenant uploads have at most ``max_tenant_bytes`` together, and leave the
        reserved part of ``space``."""
        self.space = FreeSpace() if space is None else space
        self._database = database
        self._blobs = blobs
        self._max_tenant_bytes = max_tenant_bytes
        self._num_draft_bytes: Counter[str] = Counter()
        """The bytes of each tenant's files that are being sent to this gateway and are not
        finished, and of the answers of the batches that it runs."""
        self._left_bytes: dict[str, int] = {}
        """The bytes that the finished files of each tenant left of its limit when they were last
        counted, less the files of this gateway since."""

    @asynccontextmanager
    async def writing(
        self,
        tenant: str,
        filename: str = "",
        purpose: str = "",
        *,
        is_hidden: bool = False,
        upload_id: str | None = None,
    ) -> AsyncIterator[Draft]:
        """Write a new file; the block writes to the draft and may complete it.

        The file exists after the block, or, if ``is_hidden``, once `reveal` was called. Nothing is
        left of it if the block raises. A part of an upload has an ``upload_id``. Raises
        `InvalidRequest` if the tenant has no room for it, unless it is hidden and no part.
        """
        prefix = "file-" if upload_id is None else "part_"
        file_id = f"{prefix}{secrets.token_hex(16)}"
        is_counted = not is_hidden or upload_id is not None
        hold = partial(self._hold, tenant) if is_counted else _hold_nothing
        draft = Draft(file_id, tenant, self._blobs.writer(file_id), hold, filename, purpose)
        await self._begin(draft, upload_id)
        try:
            async with draft.writer:
                yield draft
            await self._finish(draft, "uploading" if is_hidden else "processed")
            if not is_hidden:
                self.count(tenant, draft.writer.num_bytes)
        except BaseException:
            with suppress(Unavailable):  # `sweep` removes it later
                await self.discard(draft.id)
            raise
        finally:
            if is_counted:
                self._num_draft_bytes[tenant] -= draft.writer.num_bytes

    @uncancelled
    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Raises `NotFound`."""
        query = select(*_COLUMNS).where(FILES.c.id == file_id, _visible(tenant))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise not_found(file_id)
        return _record(row)

    @uncancelled
    async def page(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """At most ``limit`` files, from after the file with the id ``after``. Raises `NotFound`."""
        position = tuple_(FILES.c.created_at, FILES.c.id)
        order = (FILES.c.created_at, FILES.c.id)
        query = select(*_COLUMNS).where(_visible(tenant)).limit(limit)
        query = query.order_by(*(column.desc() for column in order) if newest_first else order)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        if after is not None:
            last = await self.get(tenant, after)
            bound = tuple_(last.created_at, last.id)
            query = query.where(position < bound if newest_first else position > bound)
        async with self._database.read() as connection:
            return [_record(row) for row in await connection.execute(query)]

    @uncancelled
    async def bytes_left(self, tenant: str) -> int:
        """How large the next file of a tenant may be. Raises `InvalidRequest` if there is no room
        for another file."""
        async with self._database.read() as connection:
            left = await self._bytes_left(connection, tenant)
        left -= self._num_draft_bytes[tenant]
        if left <= 0:
            raise InvalidRequest(_TOO_LARGE)
        return left

    async def require_room(self, connection: AsyncConnection, tenant: str, num_bytes: int) -> None:
        """Nothing else is added to a tenant's files until the transaction of the caller ends.
        Raises `InvalidRequest` if they have no room for a file of ``num_bytes``."""
        await self._database.hold(connection, _ROOM_LOCK, tenant)
        if num_bytes > await self._bytes_left(connection, tenant):
            raise InvalidRequest(_TOO_LARGE)

    def count(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that were added to a tenant's files, for which there was room."""
        if tenant in self._left_bytes:  # it is not after an erasure
            self._left_bytes[tenant] -= num_bytes

    def hold_answers(self, tenant: str, num_bytes: int) -> None:
        """Take room for the answers of a batch, which become its files. A negative number gives
        room back."""
        self._num_draft_bytes[tenant] += num_bytes

    def content(self, file_id: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to before ``end``, in parts."""
        return self._blobs.parts(file_id, start, end)

    @uncancelled
    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises `NotFound`, and `InvalidRequest` while a batch reads the file."""
        is_it = and_(FILES.c.id == file_id, _visible(tenant))
        async with self._database.begin() as connection:
            if not await lock_file(connection, tenant, file_id):
                raise not_found(file_id)
            statement = update(FILES).where(is_it, ~_IN_USE).values(state="deleted")
            is_done = (await connection.execute(statement)).rowcount == 1
        if not is_done:
            raise InvalidRequest("The file is the input of a batch that has not ended.")
        with suppress(Unavailable):  # it is deleted; `sweep` removes its bytes later
            await self._remove(file_id)

    async def erase(self, tenant: str) -> int:
        """Remove all files of a tenant, whatever their state; returns how many. A file that is
        being written when its record goes is removed by its writer."""
        num_erased = 0
        while file_ids := await self._any_of(tenant):
            for file_id in file_ids:
                await self.discard(file_id)
            num_erased += len(file_ids)
        self._left_bytes.pop(tenant, None)
        return num_erased

    async def sweep(self) -> None:
        """Remove expired files, and the remnants of unfinished and deleted files. The next sweep
        tries again to remove files that cannot be removed now."""
        last, num_left, reason = "", 0, ""
        while file_ids := await self._garbage(last):
            for file_id in file_ids:
                try:
                    await self.discard(file_id)
                except Unavailable as error:
                    num_left, reason = num_left + 1, error.message
            last = file_ids[-1]
        if num_left:
            fields = {"files": num_left, "reason": reason}
            logger.warning("files not removed, retrying later", extra=fields)

    @uncancelled
    async def discard(self, file_id: str) -> None:
        """Remove a file that is not used. It stays whole if the database cannot be reached, because
        a commit whose confirmation was lost may have made it visible. `sweep` removes the rest."""
        deletion = update(FILES).where(FILES.c.id == file_id).values(state="deleted")
        async with self._database.begin() as connection:
            await connection.execute(deletion)
        await self._remove(file_id)

    @uncancelled
    async def _remove(self, file_id: str) -> None:
        await self._blobs.delete(file_id)
        async with self._database.begin() as connection:
            await connection.execute(delete(FILES).where(FILES.c.id == file_id))

    @uncancelled
    async def _any_of(self, tenant: str) -> Sequence[str]:
        """The ids of some files of a tenant."""
        query = select(FILES.c.id).where(FILES.c.tenant == tenant).limit(_MAX_SWEPT)
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalars().all()

    @uncancelled
    async def _garbage(self, after: str) -> Sequence[str]:
        """Some files that are to be removed, in the order of their ids, from after this id."""
        now = time.time()
        is_uploading = FILES.c.state == "uploading"
        has_upload = exists().where(
            UPLOADS.c.id == FILES.c.upload_id, UPLOADS.c.expires_at > now - _COMPLETION_TIMEOUT_S
        )
        is_garbage = or_(
            FILES.c.state == "deleted",
            and_(is_uploading, FILES.c.created_at < now - _UPLOAD_TIMEOUT_S),
            and_(_IS_PART, ~has_upload),
            FILES.c.expires_at <= now,
        )
        query = select(FILES.c.id).where(is_garbage, ~_IN_USE, FILES.c.id > after)
        query = query.order_by(FILES.c.id).limit(_MAX_SWEPT)
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalars().all()

    async def _bytes_left(self, connection: AsyncConnection, tenant: str) -> int:
        """The bytes that the finished files of a tenant leave of its limit. Raises `InvalidRequest`
        if the tenant has the maximum number of files."""
        is_kept = or_(_visible(tenant), and_(FILES.c.tenant == tenant, _IS_PART))
        query = select(func.count(), func.coalesce(func.sum(FILES.c.num_bytes), 0)).where(is_kept)
        num_files, num_bytes = (await connection.execute(query)).one()
        if num_files >= MAX_FILES:
            raise InvalidRequest(f"A tenant has at most {MAX_FILES} files.")
        left = self._left_bytes[tenant] = self._max_tenant_bytes - int(num_bytes)
        return left

    async def _hold(self, tenant: str, num_bytes: int) -> None:
        """Raises `InvalidRequest` if there is no room beside the tenant's other files, and
        `Unavailable`."""
        await self.space.require()
        num_draft_bytes = self._num_draft_bytes[tenant] + num_bytes
        if num_draft_bytes > self._left_bytes.get(tenant, self._max_tenant_bytes):
            raise InvalidRequest(_TOO_LARGE)
        self._num_draft_bytes[tenant] = num_draft_bytes

    @uncancelled
    async def _begin(self, draft: Draft, upload_id: str | None) -> None:
        values = {
            "id": draft.id,
            "tenant": draft.tenant,
            "filename": "",
            "purpose": "",
            "num_bytes": 0,
            "created_at": draft.created_at,
            "state": "uploading",
            "upload_id": upload_id,
        }
        async with self._database.begin() as connection:
            await connection.execute(insert(FILES).values(values))

    @uncancelled
    async def _finish(self, draft: Draft, state: str) -> None:
        values = {
            "filename": draft.filename,
            "purpose": draft.purpose,
            "num_bytes": draft.writer.num_bytes,
            "expires_at": draft.expires_at,
            "state": state,
        }
        async with self._database.begin() as connection:
            if state == "processed":
                # Other files may have been uploaded at the same time.
                await self.require_room(connection, draft.tenant, draft.writer.num_bytes)
            is_left = and_(FILES.c.id == draft.id, FILES.c.state == "uploading")
            finished = await connection.execute(update(FILES).where(is_left).values(values))
            if not finished.rowcount:
                raise Unavailable("Writing the file took so long that it was given up.")


async def reveal(connection: AsyncConnection, file_ids: tuple[str, ...]) -> None:
    """Make hidden files exist, in the transaction of the caller."""
    statement = update(FILES).where(FILES.c.id.in_(file_ids)).values(state="processed")
    await connection.execute(statement)


async def lock_file(connection: AsyncConnection, tenant: str, file_id: str) -> bool:
    """Whether the file exists; if so, no other transaction can delete it or make a batch of it
    until the transaction of the caller ends."""
    query = select(FILES.c.id).where(FILES.c.id == file_id, _visible(tenant)).with_for_update()
    return (await connection.execute(query)).one_or_none() is not None


def not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:128]}", param="id")


def _visible(tenant: str) -> Any:
    is_kept = or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > int(time.time()))
    return and_(FILES.c.tenant == tenant, FILES.c.state == "processed", is_kept)


async def _hold_nothing(_: int) -> None:
    """The answers of batches have held room for their files, and copies of parts replace them."""


def _record(row: Any) -> FileRecord:
    return FileRecord(*row)
