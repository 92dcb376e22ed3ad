"""The state of a deployment, opened when it is first needed.

A gateway that stores nothing creates no database. A gateway that finds a database at its start
opens it, because there may be batches to continue and responses to complete.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.store.batches import Batches
from gateway.store.database import SQLITE_FILE, Database
from gateway.store.files.blobs import Blobs, file_credentials
from gateway.store.files.exact_answers import ExactAnswers
from gateway.store.files.free_space import FreeSpace
from gateway.store.files.records import Files
from gateway.store.files.uploads import Uploads
from gateway.store.history.conversations import Conversations
from gateway.store.history.replays import Replays
from gateway.store.history.responses import Responses
from gateway.store.history.room import StoreLimits, TenantRoom
from gateway.store.seen_models import SeenModels
from gateway.store.tenants.erasure import Erasure
from gateway.store.tenants.keys import StoredKeys
from gateway.store.tenants.limits import StoredLimits
from gateway.store.tenants.sessions import StoredEndings
from gateway.store.usage import UsageRecords
from gateway.store.webhooks import Webhooks
from shared.errors import StartupError, Unavailable
from shared.settings import DAY_S, GatewaySettings
from shared.telemetry.store_outage import StoreOutage

logger = logging.getLogger(__name__)

_BYTES_PER_OBJECT = 64 << 10
"""A tenant may have as many responses and conversations as fit its space with this size."""
_LOOK_INTERVAL_S = 2.0
_RETRY_PAUSE_S = 1.0
_FIRST_READ_S = 5.0
"""Seconds that the start of a gateway waits for the database."""
_LAST_WRITES_S = 5.0
_SETTLE_S = 15.0
"""Gateways ask the database every few seconds, so its outages end soon after this time."""
_UNUSABLE = "This gateway cannot store anything."


@dataclass(frozen=True, slots=True)
class StoredState:
    files: Files
    uploads: Uploads
    batches: Batches
    webhooks: Webhooks
    responses: Responses
    conversations: Conversations
    room: TenantRoom
    usage: UsageRecords
    models: SeenModels
    erasure: Erasure
    keys: StoredKeys
    limits: StoredLimits
    sessions: StoredEndings
    exact_answers: ExactAnswers
    replays: Replays

    @property
    def spaces(self) -> tuple[FreeSpace, FreeSpace]:
        """The space on the disks of the database and of the files."""
        return self.room.space, self.files.space


class Store:
    """Opens the state once.

    Outages of the database, which begin if it cannot be opened, and of the storage of files are
    logged and can be asked for, and so is a lack of space on their disks.
    """

    def __init__(self, settings: GatewaySettings, retry_pause_s: float = _RETRY_PAUSE_S) -> None:
        """Raises `StartupError` if the credentials of the storage of files cannot be read: a wrong
        path must not remain unnoticed until an upload."""
        if settings.files_url is not None:
            file_credentials(settings.files_url)
        self.outages = {
            "database": StoreOutage("database", _SETTLE_S),
            "files": StoreOutage("file storage"),
            "database_disk": StoreOutage("disk of the database"),
            "files_disk": StoreOutage("disk of files"),
        }
        self._settings = settings
        self._retry_pause_s = retry_pause_s
        self._database: Database | None = None
        self._state: StoredState | None = None
        self._lock = asyncio.Lock()
        self._is_open = asyncio.Event()
        self._retry_at = 0.0
        self._writes: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    @property
    def is_in_use(self) -> bool:
        """Whether there is a database, which this or another gateway has created."""
        if self._settings.database_url is not None:
            return True
        try:
            return (self._data_dir() / SQLITE_FILE).exists()
        except StartupError:
            return False

    async def open(self) -> StoredState:
        """The state. Raises `Unavailable`, for a while without another attempt."""
        if self._state is not None:
            return self._state
        async with self._lock:
            if time.monotonic() < self._retry_at:
                raise Unavailable(_UNUSABLE)
            try:
                return await self._opened()
            except StartupError:  # its message names paths
                self._retry_at = time.monotonic() + self._retry_pause_s
                raise Unavailable(_UNUSABLE) from None
            except Unavailable:
                self._retry_at = time.monotonic() + self._retry_pause_s
                raise

    async def open_as_set(self) -> StoredState:
        """The state. Raises `Unavailable`, and `StartupError` if the settings are not usable."""
        async with self._lock:
            return await self._opened()

    async def wait_open(self) -> StoredState:
        """Wait until the state is needed, here or by another gateway of the machine, and return
        it as soon as the database can be reached."""
        while not self.is_in_use and not self._is_open.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_INTERVAL_S):
                    await self._is_open.wait()
        while True:
            try:
                return await self.open()
            except Unavailable:
                await asyncio.sleep(self._retry_pause_s)

    async def read_first(self, read: Callable[[], Awaitable[None]], what: str) -> None:
        """Call ``read``, which reads ``what`` of the state, before the first request comes, unless
        nothing is stored yet or the database does not answer."""
        if not self.is_in_use:
            return
        try:
            async with asyncio.timeout(_FIRST_READ_S):
                await read()
        except (Unavailable, TimeoutError):
            logger.warning("database not read at the start, retrying", extra={"what": what})

    async def keep_read(self, read: Callable[[], Awaitable[None]], interval_s: float) -> None:
        """Call ``read`` once the state is open, and again after each interval; never returns."""
        await self.wait_open()
        while True:
            with suppress(Unavailable):  # which the outage of the database reports
                await read()
            await asyncio.sleep(interval_s)

    async def keep_swept(
        self, sweep: Callable[[StoredState], Awaitable[None]], interval_s: float
    ) -> None:
        """Call ``sweep`` once the state is open, and again after each interval, until cancelled.
        The next call makes up for a call that does not reach the database."""
        while True:
            try:
                await sweep(await self.wait_open())
            except Unavailable as error:
                logger.warning("sweep failed, repeated later", extra={"reason": error.message})
            await asyncio.sleep(interval_s)

    async def write(self, work: Coroutine[Any, Any, None], max_wait_s: float) -> None:
        """Run ``work``, which raises nothing, and wait for it, but not for long. It continues after
        that, and if the caller is cancelled."""
        writing = asyncio.create_task(work)
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        await asyncio.wait([writing], timeout=max_wait_s)

    async def close(self) -> None:
        """Close the database after the current writes, but do not wait long for them. It is not
        opened afterwards."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=_LAST_WRITES_S)
        self._closed.set()
        if self._database is not None:
            await self._database.close()

    async def _opened(self) -> StoredState:
        if self._closed.is_set():
            raise Unavailable(_UNUSABLE)
        if self._state is None:
            settings = self._settings
            blobs = self._opened_blobs()
            database = await self._opened_database()
            if self._closed.is_set():  # meanwhile
                await database.close()
                raise Unavailable(_UNUSABLE)
            self._database = database
            files = Files(
                database,
                blobs,
                max_tenant_bytes=settings.max_tenant_bytes,
                space=FreeSpace(blobs.directory, self.outages["files_disk"]),
            )
            uploads = Uploads(database, files, settings.max_file_bytes)
            batches, webhooks = Batches(database), Webhooks(database)
            limits = StoreLimits(
                settings.retention_days.files * DAY_S,
                settings.max_tenant_bytes // _BYTES_PER_OBJECT,
                settings.max_tenant_bytes,
            )
            space = FreeSpace(database.directory, self.outages["database_disk"])
            room = TenantRoom(database, limits, space)
            exact_answers = ExactAnswers(database, blobs)
            self._state = StoredState(
                files,
                uploads,
                batches,
                webhooks,
                Responses(database, room),
                Conversations(database, room),
                room,
                UsageRecords(database),
                SeenModels(database),
                Erasure(database, files, exact_answers),
                StoredKeys(database),
                StoredLimits(database),
                StoredEndings(database),
                exact_answers,
                Replays(database),
            )
            self._is_open.set()
        return self._state

    def _opened_blobs(self) -> Blobs:
        settings, outage = self._settings, self.outages["files"]
        try:
            if settings.files_url is not None:
                return Blobs.at(settings.files_url, outage)
            return Blobs.in_directory(self._data_dir() / "files", outage)
        except StartupError as error:
            outage.failed(error.message)
            raise

    async def _opened_database(self) -> Database:
        settings, outage = self._settings, self.outages["database"]
        url = settings.database_url
        try:
            if url is not None:
                return await Database.open(url.get_secret_value(), Path(), outage)
            return await Database.open(None, self._data_dir(), outage)
        except StartupError as error:
            outage.failed(error.message)
            raise

    def _data_dir(self) -> Path:
        """Raises `StartupError`."""
        data_dir = self._settings.data_dir
        try:
            return data_dir.expanduser()
        except RuntimeError:
            raise StartupError(
                f"WARREN_DATA_DIR is {data_dir}, and this user has no home directory: set it to an "
                "absolute path"
            ) from None
