"""Uploads: files that arrive in parts.

    pending ──> completed (its file exists)
       ├──────> cancelled
       └──────> expired

A part is a file that only its upload refers to. Completing an upload copies the parts into the
file; then one transaction, which requires a pending upload, makes the file exist and deletes the
parts. A process that dies before this transaction leaves a pending upload, and `Files.sweep`
removes the copy.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakValueDictionary

from sqlalchemy import and_, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.store.database import Database, uncancelled
from gateway.store.files.records import Draft, Files, reveal
from gateway.store.schema import FILES, UPLOADS
from shared.errors import InvalidRequest, NotFound, Unavailable

UploadStatus: TypeAlias = Literal["pending", "completed", "cancelled", "expired"]

MAX_PARTS = 10_000
MAX_UPLOADS = 100_000
"""Uploads of a tenant, including uploads that have ended and are still known."""
LIFETIME_S = 3600
"""Seconds from the creation of an upload to its expiry, as OpenAI has them."""
_KEPT_S = 24 * 3600
"""Seconds for which an upload that has expired is still known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRecord:
    """An upload. Times are Unix times in seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    """The size that its file is to have."""
    created_at: int
    expires_at: int
    kept_s: int
    """Seconds after which its file expires."""
    state: Literal["pending", "completed", "cancelled"]
    file_id: str | None
    """Its file, once it is completed."""
    body_hash: str | None

    @property
    def status(self) -> UploadStatus:
        is_expired = self.state == "pending" and self.expires_at <= time.time()
        return "expired" if is_expired else self.state


class Uploads:
    """The uploads of all tenants. Every method raises `Unavailable`."""

    def __init__(self, database: Database, files: Files, max_bytes: int) -> None:
        """The parts of an upload have at most ``max_bytes`` together."""
        self._database = database
        self._files = files
        self._max_bytes = max_bytes
        self._completing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    @uncancelled
    async def create(
        self, tenant: str, *, filename: str, purpose: str, num_bytes: int, kept_s: int
    ) -> UploadRecord:
        """Raises `InvalidRequest` if the tenant has `MAX_UPLOADS`."""
        now = int(time.time())
        values = {
            "id": f"upload_{secrets.token_hex(16)}",
            "tenant": tenant,
            "filename": filename,
            "purpose": purpose,
            "num_bytes": num_bytes,
            "created_at": now,
            "expires_at": now + LIFETIME_S,
            "kept_s": kept_s,
            "state": "pending",
        }
        known = select(func.count()).select_from(UPLOADS).where(UPLOADS.c.tenant == tenant)
        async with self._database.read() as connection:  # a few at once may exceed the limit
            if (await connection.execute(known)).scalar_one() >= MAX_UPLOADS:
                raise InvalidRequest(f"A tenant begins at most {MAX_UPLOADS} uploads a day.")
        async with self._database.begin() as connection:
            await connection.execute(insert(UPLOADS).values(values))
        return await self.get(tenant, str(values["id"]))

    @uncancelled
    async def get(self, tenant: str, upload_id: str) -> UploadRecord:
        """Raises `NotFound`."""
        query = select(UPLOADS).where(UPLOADS.c.id == upload_id, UPLOADS.c.tenant == tenant)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"No such Upload object: {upload_id[:128]}", param="upload_id")
        return UploadRecord(**row._mapping)

    @asynccontextmanager
    async def writing_part(self, tenant: str, upload_id: str) -> AsyncIterator[Draft]:
        """Write a part, which exists after the block. Nothing is left of it if the block raises.

        Raises `NotFound`, and `InvalidRequest` if the upload takes no more parts, or the tenant has
        no room for it.
        """
        upload = _require_pending(await self.get(tenant, upload_id))
        async with self._files.writing(tenant, is_hidden=True, upload_id=upload.id) as draft:
            yield draft
        try:
            await self._add(upload, draft)
        except BaseException:
            with suppress(Unavailable):  # `Files.sweep` removes it later
                await self._files.discard(draft.id)
            raise

    async def complete(
        self,
        tenant: str,
        upload_id: str,
        part_ids: Sequence[str],
        *,
        body_hash: str,
        md5: str | None = None,
    ) -> UploadRecord:
        """Make a file of these parts, in this order. ``md5`` is the hexadecimal digest of its
        bytes. A repetition, which has the same ``body_hash``, returns the same upload. A repetition
        that comes meanwhile waits.

        Raises `NotFound`, and `InvalidRequest` if the upload is not pending, a part is unknown or
        repeated, or size or digest are not as announced; the upload is then as before.
        """
        # Copies do not count towards the tenant's limit: without the lock, any number of them could
        # fill the storage at once.
        lock = self._completing.setdefault((tenant, upload_id), asyncio.Lock())
        async with lock:
            return await self._complete(tenant, upload_id, part_ids, body_hash, md5)

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        """Raises `NotFound`, and `InvalidRequest` if the upload is not pending."""
        upload = await self.get(tenant, upload_id)
        if upload.status == "pending":
            await self._end(upload, state="cancelled")
            upload = await self.get(tenant, upload_id)
        if upload.status != "cancelled":
            raise _not_pending(upload)
        return upload

    async def sweep(self) -> None:
        """Forget uploads that ended long ago. `Files.sweep` removes their parts."""
        await self._database.delete(UPLOADS, UPLOADS.c.expires_at < time.time() - _KEPT_S)

    async def _complete(
        self,
        tenant: str,
        upload_id: str,
        part_ids: Sequence[str],
        body_hash: str,
        md5: str | None,
    ) -> UploadRecord:
        upload = await self.get(tenant, upload_id)
        if upload.body_hash == body_hash:
            return upload
        _require_pending(upload)
        try:
            await self._check_parts(upload, part_ids)
            file_id = await self._copy(upload, part_ids, md5)
            ended = self._end(upload, state="completed", file_id=file_id, body_hash=body_hash)
            if not await ended:
                with suppress(Unavailable):  # `Files.sweep` removes it later
                    await self._files.discard(file_id)
        except (InvalidRequest, FileNotFoundError):
            # Unless another request has just ended the upload, and its parts are gone.
            if (await self.get(tenant, upload_id)).status == "pending":
                raise
        upload = await self.get(tenant, upload_id)
        if upload.body_hash != body_hash:
            raise _not_pending(upload)
        return upload

    @uncancelled
    async def _add(self, upload: UploadRecord, draft: Draft) -> None:
        """Make a part of a file that was written."""
        query = select(func.count(), func.coalesce(func.sum(FILES.c.num_bytes), 0)).where(
            _is_part_of(upload)
        )
        async with self._database.begin() as connection:
            await _lock(connection, upload)
            num_parts, num_bytes = (await connection.execute(query)).one()
            if num_parts >= MAX_PARTS:
                raise InvalidRequest(f"An upload has at most {MAX_PARTS} parts.")
            if num_bytes + draft.writer.num_bytes > self._max_bytes:
                message = f"The parts of an upload have at most {self._max_bytes} bytes together."
                raise InvalidRequest(message, param="data")
            await self._files.require_room(connection, upload.tenant, draft.writer.num_bytes)
            statement = update(FILES).where(FILES.c.id == draft.id).values(state="part")
            await connection.execute(statement)
        self._files.count(upload.tenant, draft.writer.num_bytes)

    @uncancelled
    async def _check_parts(self, upload: UploadRecord, part_ids: Sequence[str]) -> None:
        query = select(FILES.c.id, FILES.c.num_bytes).where(_is_part_of(upload))
        async with self._database.read() as connection:
            sizes: dict[str, int] = {
                row.id: row.num_bytes for row in await connection.execute(query)
            }
        for part_id in part_ids:
            if part_id not in sizes:
                message = f"part_ids: the upload has no part {part_id[:64]!r}."
                raise InvalidRequest(message, param="part_ids")
        if len(set(part_ids)) < len(part_ids):
            raise InvalidRequest("part_ids: expected each part once.", param="part_ids")
        num_bytes = sum(sizes[part_id] for part_id in part_ids)
        if num_bytes != upload.num_bytes:
            raise InvalidRequest(
                f"part_ids: the parts have {num_bytes} bytes together, but the upload was created "
                f"for {upload.num_bytes}.",
                param="part_ids",
            )

    async def _copy(self, upload: UploadRecord, part_ids: Sequence[str], md5: str | None) -> str:
        """Write the parts into a hidden file; returns its id. Raises `InvalidRequest`, and
        `FileNotFoundError` if a part was deleted meanwhile."""
        await self._files.space.require()
        digest = hashlib.md5(usedforsecurity=False)
        writing = self._files.writing(
            upload.tenant, upload.filename, upload.purpose, is_hidden=True
        )
        async with writing as draft:
            draft.expires_at = int(time.time()) + upload.kept_s
            for part_id in part_ids:
                async for data in self._files.content(part_id):
                    if md5 is not None:
                        digest.update(data)
                    await draft.write(data)
            if md5 is not None and digest.hexdigest() != md5.lower():
                message = f"md5: the digest of the parts is {digest.hexdigest()}."
                raise InvalidRequest(message, param="md5")
        return draft.id

    @uncancelled
    async def _end(
        self,
        upload: UploadRecord,
        *,
        state: Literal["completed", "cancelled"],
        file_id: str | None = None,
        body_hash: str | None = None,
    ) -> bool:
        """Whether the upload was pending; its parts are deleted then, and its file exists."""
        ending = (
            update(UPLOADS)
            .where(UPLOADS.c.id == upload.id, UPLOADS.c.state == "pending")
            .values(state=state, file_id=file_id, body_hash=body_hash)
        )
        async with self._database.begin() as connection:
            if not (await connection.execute(ending)).rowcount:
                return False
            if file_id is not None:
                await reveal(connection, (file_id,))
            deletion = update(FILES).where(_is_part_of(upload)).values(state="deleted")
            await connection.execute(deletion)
        return True


def _require_pending(upload: UploadRecord) -> UploadRecord:
    """Raises `InvalidRequest`."""
    if upload.status != "pending":
        raise _not_pending(upload)
    return upload


def _not_pending(upload: UploadRecord) -> InvalidRequest:
    return InvalidRequest(f"The status of the upload is '{upload.status}'.", param="upload_id")


async def _lock(connection: AsyncConnection, upload: UploadRecord) -> None:
    """Keep the upload pending until the transaction of the caller ends. Raises `InvalidRequest`."""
    query = select(UPLOADS).where(UPLOADS.c.id == upload.id).with_for_update()
    row = (await connection.execute(query)).one_or_none()
    _require_pending(upload if row is None else UploadRecord(**row._mapping))


def _is_part_of(upload: UploadRecord) -> Any:
    return and_(FILES.c.upload_id == upload.id, FILES.c.state == "part")
