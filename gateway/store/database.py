"""The database: SQLite in the data directory, or PostgreSQL by URL.

`Database.open` migrates the schema under a lock, so that several gateways may start at once.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    delete,
    event,
    func,
    select,
    text,
    tuple_,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from gateway.store.postgres.url import connect_args, fault_of_settings
from shared.errors import InvalidRequest, StartupError, Unavailable
from shared.telemetry.store_outage import StoreOutage

if TYPE_CHECKING:
    from alembic.config import Config

logger = logging.getLogger(__name__)

SQLITE_FILE = "warren.db"
_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_S = 30
_BUSY_RETRY_S = 0.05
_POOL_TIMEOUT_S = 10
"""Seconds for which a transaction waits for a connection, while all are in use."""
_STATEMENT_TIMEOUT_S = 60.0
"""Seconds after which PostgreSQL is taken to be out of reach. A machine that is gone closes no
connection."""
_MIGRATION_TIMEOUT_S = 3600.0
"""The same for a statement of a migration, which may index a large table."""
_MAX_DELETED = 1000
"""Rows that a single transaction deletes. A statement over all rows, and over the rows that are
deleted with them, would exceed its time."""
_IS_READING = "is_reading"
_LOCK_TIMEOUT_S = 20
"""Seconds to wait for another gateway's migration before retrying."""
_CLOSING_S = 15
_ADVISORY_LOCK = 0x57415252
"""Any number that all gateways agree on."""
_NOT_IN_REPERTOIRE = "22021"
_DATA_ERRORS = "22"
_PASSING_ERRORS = ("08", "25", "28", "3D", "40", "53", "55", "57", "58")
"""The classes of SQLSTATE for what a later attempt may not meet: lost connections, a read-only
standby, a changed password, a database that is being restored, deadlocks, a full disk or memory,
locks, an operator's intervention, and I/O errors."""
_BROKEN_FILE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_SQLITE, _POSTGRESQL = "sqlite+aiosqlite", "postgresql+asyncpg"
_POSTGRESQL_SCHEMES = ("postgresql", "postgres")


def uncancelled(
    method: Callable[_Params, Coroutine[Any, Any, _Result]],
) -> Callable[_Params, Coroutine[Any, Any, _Result]]:
    """Make a method end its transaction even if its caller is cancelled meanwhile, however often. A
    connection that is abandoned within a transaction keeps its locks for a while."""

    @wraps(method)
    async def run(*args: _Params.args, **options: _Params.kwargs) -> _Result:
        running = asyncio.create_task(method(*args, **options))
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return running.result()
        with suppress(Exception):  # no caller is left to report to
            running.result()
        raise cancelled

    return run


class Database:
    """A pool of connections to a database."""

    def __init__(self, engine: AsyncEngine, outage: StoreOutage) -> None:
        self._engine = engine
        self._outage = outage
        self._reading = engine.execution_options(**{_IS_READING: True})
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, url: str | None, data_dir: Path, outage: StoreOutage | None = None) -> Self:
        """Connect to the database at ``url``, or to the SQLite file of ``data_dir``, and migrate
        it. Failures of transactions are reported to ``outage``.

        Raises `StartupError` for an invalid URL or directory, and `Unavailable`."""
        outage = StoreOutage("database") if outage is None else outage
        url = url if url is not None else _file_in(data_dir)
        migrating = cls(_engine(url, _MIGRATION_TIMEOUT_S), outage)
        try:
            await migrating._migrate()
        except (Unavailable, DBAPIError) as error:
            fault = fault_of_settings(error.__cause__ if isinstance(error, Unavailable) else error)
            if fault is not None:
                raise fault from None
            raise
        finally:
            await migrating.close()
        return cls(_engine(url, _STATEMENT_TIMEOUT_S), outage)

    @classmethod
    def at(cls, url: str, outage: StoreOutage) -> Self:
        """The database at ``url``, as it is. Raises `StartupError` for an invalid URL."""
        return cls(_engine(url, _STATEMENT_TIMEOUT_S), outage)

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @property
    def directory(self) -> Path | None:
        """Where SQLite's file is."""
        return Path(self._engine.url.database or "").parent if self.is_sqlite else None

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, which ends with the block. Raises `Unavailable` if the database was
        closed, cannot be reached or is in no state to do the work; a transaction whose commit was
        interrupted may have taken effect.
        Raises `InvalidRequest` for a text that PostgreSQL cannot hold, which no record has."""
        async with (
            self._turn() if self.is_sqlite else nullcontext(),
            self._transaction(self._engine) as connection,
        ):
            yield connection

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that writes nothing. On SQLite it neither waits for other transactions nor
        holds them up. Raises the errors of `begin`."""
        return self._transaction(self._reading)

    async def delete(self, table: Table, condition: ColumnElement[bool]) -> int:
        """Delete rows in transactions of limited size; returns how many. Raises `Unavailable`."""
        num_deleted = 0
        # Others delete, too, so fewer may be left to delete than were found.
        while num := await self._delete_some(table, condition):
            num_deleted += num
        return num_deleted

    async def hold(self, connection: AsyncConnection, lock: int, name: str = "") -> None:
        """Hold a lock until the end of the connection's transaction, once no other transaction
        holds it. SQLite needs no lock, because it has one writing transaction at a time."""
        if not self.is_sqlite:
            await connection.execute(select(func.pg_advisory_xact_lock(lock, func.hashtext(name))))

    @uncancelled
    async def close(self) -> None:
        """Close all connections, once no transaction is open or some seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                while self._num_open:
                    await self._is_idle.wait()
        self._is_closed = True  # the pool would connect again
        await self._engine.dispose()

    @uncancelled
    async def _delete_some(self, table: Table, condition: ColumnElement[bool]) -> int:
        key = table.primary_key.columns
        # Unless it locks them, it finds rows that another transaction is about to have deleted.
        some = select(*key).where(condition).limit(_MAX_DELETED).with_for_update()
        async with self.begin() as connection:
            deleted = await connection.execute(delete(table).where(tuple_(*key).in_(some)))
        return deleted.rowcount

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The turn of a writer: on SQLite there is one writer at a time, and writers that wait in
        the database would take the connections of readers."""
        try:
            async with asyncio.timeout(_BUSY_TIMEOUT_S):
                await self._writing.acquire()
        except TimeoutError:
            self._outage.failed("another transaction does not end")
            raise Unavailable("The database is unavailable.") from None
        try:
            yield
        finally:
            self._writing.release()

    @asynccontextmanager
    async def _transaction(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        if self._is_closed:
            raise Unavailable("The database is closed.")
        self._num_open += 1
        self._is_idle.clear()
        is_writing = engine is not self._reading
        try:
            async with engine.begin() as connection:
                yield connection
            self._outage.worked(is_writing=is_writing)
        except Exception as error:
            if _is_unavailable(error):
                self._outage.failed(reason_of(error), is_writing=is_writing)
                raise Unavailable("The database is unavailable.") from error
            if isinstance(error, DBAPIError) and _sqlstate(error) == _NOT_IN_REPERTOIRE:
                raise InvalidRequest("The character U+0000 is not allowed.") from None
            raise
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()

    @uncancelled
    async def _migrate(self) -> None:
        await asyncio.to_thread(_revisions)  # to import all of them takes a while
        async with self.begin() as connection:
            # On SQLite, every transaction begins with the lock of the whole database.
            if not self.is_sqlite:
                await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'"))
                lock = text("SELECT pg_advisory_xact_lock(:lock)")
                await connection.execute(lock, {"lock": _ADVISORY_LOCK})
            await connection.run_sync(_upgrade)


def _file_in(data_dir: Path) -> str:
    """The URL of the SQLite file in ``data_dir``. Raises `StartupError`."""
    path = data_dir / SQLITE_FILE
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The directory may be open to other users, and SQLite's other files copy this mode.
        path.touch(mode=0o600)
    except OSError as error:
        raise StartupError(f"{data_dir} cannot be used: {error.strerror}") from None
    return URL.create(_SQLITE, database=str(path)).render_as_string()


def _engine(url: str, statement_timeout_s: float) -> AsyncEngine:
    """Raises `StartupError` for an invalid URL."""
    scheme = url.partition("://")[0]
    if scheme in _POSTGRESQL_SCHEMES:
        return _postgresql(url, statement_timeout_s)
    if not scheme.startswith("sqlite"):
        raise StartupError("the URL of the database must begin with postgresql:// or sqlite:///")
    try:
        place = make_url(url).set(drivername=_SQLITE)
    except ArgumentError:
        raise StartupError("the URL of the database is not valid") from None
    engine = create_async_engine(
        place,
        pool_timeout=_POOL_TIMEOUT_S,
        hide_parameters=True,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "isolation_level": None},
    )
    event.listen(engine.sync_engine, "connect", _configure_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_on_sqlite)
    return engine


def _postgresql(url: str, statement_timeout_s: float) -> AsyncEngine:
    return create_async_engine(
        f"{_POSTGRESQL}://",
        pool_pre_ping=True,
        pool_timeout=_POOL_TIMEOUT_S,
        hide_parameters=True,
        connect_args={
            **connect_args(url),
            "command_timeout": statement_timeout_s,
            # A pooler such as pgbouncer may give each transaction another connection of the server,
            # which does not have the statements that were prepared before.
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": str,  # unnamed
        },
    )


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    try:
        _write_ahead(cursor)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
    except BaseException:  # the pool forgets this one
        connection.close()
        raise


def _write_ahead(cursor: Any) -> None:
    """Set the mode of the journal. SQLite refuses it at once, whatever the timeout, while another
    gateway sets it."""
    end = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            await_only(asyncio.sleep(_BUSY_RETRY_S))
        else:
            return


def _begin_on_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes would fail if another transaction wrote in
    # between.
    is_reading = connection.get_execution_options().get(_IS_READING, False)
    connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")


def _config() -> "Config":
    # Many gateways never need alembic, and its plugins announce themselves when they are imported.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


@cache
def _revisions() -> tuple[str, ...]:
    """The migrations of this version, the newest first."""
    config = _config()
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(config).walk_revisions()
    return tuple(script.revision for script in scripts)


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.migration import MigrationContext

    newest, *_ = known = _revisions()
    current = MigrationContext.configure(connection).get_current_heads()
    if current == (newest,):
        return
    if not set(current) <= set(known):
        # Migrations only add, so that gateways of two versions can share a database.
        fields = {"revisions": sorted(set(current) - set(known))}
        logger.warning("a newer version has migrated the database", extra=fields)
        return
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def reason_of(error: BaseException) -> str:
    """The reason of a failure, without the statement and its values, which are a user's."""
    if _is_damaged(error):
        return (
            f"{SQLITE_FILE} is damaged, or is no SQLite database: restore it from a backup, or "
            "move it away to begin with an empty one"
        )
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig.__cause__ or error.orig  # the driver's own
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def refuses_values(error: Exception) -> bool:
    """Whether a transaction failed because of the values that it was to write. Any other error may
    be gone at the next attempt."""
    if isinstance(error, DBAPIError):
        # asyncpg's errors about values have no class of SQLAlchemy's.
        is_of_data = (_sqlstate(error) or "").startswith(_DATA_ERRORS)
        is_of_driver = error.orig is not None and isinstance(error.orig.__cause__, ValueError)
        return isinstance(error, DataError | IntegrityError) or is_of_data or is_of_driver
    return isinstance(error, InvalidRequest)


def _is_damaged(error: BaseException | None) -> bool:
    """Whether the error says that the SQLite file is damaged, or is none."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BROKEN_FILE


def _is_unavailable(error: Exception) -> bool:
    """Whether the database could not be reached or do any work, rather than refused a statement."""
    if isinstance(error, IntegrityError):
        return False
    if isinstance(error, DBAPIError):
        return (
            error.connection_invalidated
            or isinstance(error.orig, OSError | sqlite3.OperationalError)
            or _is_damaged(error)
            or (_sqlstate(error) or "").startswith(_PASSING_ERRORS)
        )
    # Neither timeouts nor what asyncpg raises while it connects are wrapped.
    is_of_driver = type(error).__module__.startswith("asyncpg") or _is_damaged(error)
    return isinstance(error, OSError | PoolTimeoutError) or is_of_driver
