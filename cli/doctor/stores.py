"""The checks of ``warren doctor`` that concern what a gateway stores: the database and the files.

The database is only read. In the storage of files, a blob is written, read and deleted.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import make_url

from cli.doctor.findings import Finding, failure, ok, warning
from gateway.store.database import Database, reason_of
from gateway.store.files.blobs import Blobs
from shared.errors import StartupError, Unavailable
from shared.settings import GatewaySettings
from shared.telemetry.store_outage import StoreOutage

_TIMEOUT_S = 15.0
_FEW_BYTES = 1 << 30


class _Unlogged(StoreOutage):
    """An outage that only a finding reports."""

    def failed(self, reason: str, *, is_writing: bool = True) -> None:
        """Log nothing."""


def check_stores(settings: GatewaySettings) -> Iterator[Finding]:
    """Check the database, and the storage of files, that are configured, or the data directory in
    their place."""
    url = settings.database_url
    if url is not None:
        yield asyncio.run(_database(url.get_secret_value()))
    if settings.files_url is not None:
        yield asyncio.run(_files(settings.files_url))
    if url is None or settings.files_url is None:
        yield _directory(settings.data_dir.expanduser())


async def _database(url: str) -> Finding:
    remedy = "start it, or correct WARREN_DATABASE_URL; only streams work without it"
    try:
        database = Database.at(url, _Unlogged("database"))
    except StartupError as error:
        return failure("database", error.message, "correct WARREN_DATABASE_URL")
    try:
        async with asyncio.timeout(_TIMEOUT_S), database.read() as connection:
            await connection.execute(select(1))
    except (Unavailable, TimeoutError) as error:
        reason = reason_of(error.__cause__ or error)
        return failure("database", f"it cannot be used: {reason}", remedy)
    finally:
        await database.close()
    return ok("database", f"{make_url(url).render_as_string(hide_password=True)} answers")


async def _files(url: str) -> Finding:
    name = f"doctor-{secrets.token_hex(8)}"
    try:
        blobs = Blobs.at(url, _Unlogged("file storage"))
        async with asyncio.timeout(_TIMEOUT_S):
            async with blobs.writer(name) as writer:
                await writer.write(b"warren doctor")
            async for _ in blobs.parts(name):
                pass
            await blobs.delete(name)
    except StartupError as error:
        return failure("files", error.message, "correct WARREN_FILES_URL")
    except TimeoutError:
        reason = f"it does not answer within {_TIMEOUT_S:.0f} s"
    except (FileNotFoundError, Unavailable) as error:
        reason = reason_of(error.__cause__ or error)
    else:
        return ok("files", f"{url}: a file was written, read and deleted")
    return failure(
        "files",
        f"{url} cannot be used: {reason}",
        "correct WARREN_FILES_URL, its credentials and what they may do",
    )


def _directory(path: Path) -> Finding:
    """It is created when something is stored for the first time."""
    present = next(one for one in (path, *path.parents) if one.exists())
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        return failure(
            "data dir",
            f"{present} is not a directory in which this user may write",
            "correct WARREN_DATA_DIR, or the owner of the directory",
        )
    free = shutil.disk_usage(present).free
    detail = f"{path} has {free / 2**30:.1f} GiB free"
    if free < _FEW_BYTES:
        return warning("data dir", detail, "free space, or correct WARREN_DATA_DIR")
    return ok("data dir", detail)
