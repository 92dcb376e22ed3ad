"""The bytes of files, in a directory or in an object store such as S3.

Memory is bounded: blobs are written and read in parts.
"""

import asyncio
import configparser
import itertools
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from gateway.store.database import reason_of
from shared.errors import StartupError, Unavailable
from shared.settings import secret_in
from shared.telemetry.store_outage import StoreOutage

_PART_BYTES = 5 << 20
"""The smallest part that S3 takes."""
_MAX_PARTS_AT_ONCE = 2
_READ_BYTES = 1 << 20
"""Bytes that a request reads. No request is open while a reader is busy, which may take hours."""
_TIMEOUT = timedelta(minutes=10)
"""The time for a whole request to a store, which transfers a few MiB."""
_READ_TIMEOUT = timedelta(seconds=30)
"""The time within which more data must arrive."""
_RETRY_TIMEOUT = timedelta(seconds=30)
"""After which a request that has failed is not tried again. By default it is three minutes, so that
a store that sends nothing would be asked six times."""
_CLIENT_OPTIONS = ("allow_http", "proxy_url", "proxy_ca_certificate", "proxy_excludes")
"""Options of connections that environment and credentials may contain."""
_CREDENTIALS_FILE = "AWS_SHARED_CREDENTIALS_FILE"
_S3 = ("s3://", "s3a://")
_Result = TypeVar("_Result")


class _Abandoned(Exception):
    """The block of a writer has failed."""


class BlobWriter:
    """Writes a blob, which exists once the block ends without an error."""

    def __init__(self, store: ObjectStore, name: str, outage: StoreOutage) -> None:
        self.num_bytes = 0
        self._store = store
        self._name = name
        self._outage = outage
        self._directory = _directory(store)
        self._chunks: asyncio.Queue[bytes | _Abandoned | None] = asyncio.Queue(maxsize=1)
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._put())
        return self

    async def write(self, data: bytes) -> None:
        """Raises `Unavailable`."""
        self.num_bytes += len(data)
        if data:
            await self._pass_on(data)

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        assert self._writing is not None
        try:
            await self._pass_on(None if error is None else _Abandoned())
            await self._writing
            if error is None:
                if self._directory is not None:
                    await asyncio.to_thread(_sync, self._directory, self._name)
                self._outage.worked()
        except OSError as failure:
            raise _unreachable(failure, self._outage) from failure
        except Unavailable:
            if error is None:
                raise

    async def _pass_on(self, chunk: "bytes | _Abandoned | None") -> None:
        assert self._writing is not None
        putting = asyncio.create_task(self._chunks.put(chunk))
        try:
            await asyncio.wait([putting, self._writing], return_when=asyncio.FIRST_COMPLETED)
            if self._writing.done():
                await self._writing
        finally:
            putting.cancel()

    async def _put(self) -> None:
        try:
            await obstore.put_async(
                self._store,
                self._name,
                self._arrived(),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_MAX_PARTS_AT_ONCE,
            )
        except _Abandoned:
            # Some stores keep the parts that have arrived as a blob.
            await _delete(self._store, self._name, self._outage)
        except (BaseError, OSError) as error:
            raise _unreachable(error, self._outage) from error

    async def _arrived(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, _Abandoned):
                raise chunk
            yield chunk


class Blobs:
    """Blobs by name."""

    def __init__(self, store: ObjectStore, outage: StoreOutage | None = None) -> None:
        """Failures are reported to ``outage``."""
        self._store = store
        self._outage = StoreOutage("file storage") if outage is None else outage

    @classmethod
    def at(cls, url: str, outage: StoreOutage | None = None) -> Self:
        """The blobs under a URL. Credentials and the like come from the variables of the store's
        own tools, such as ``AWS_ACCESS_KEY_ID`` and ``AWS_ENDPOINT_URL``, and first of all from the
        file that ``AWS_SHARED_CREDENTIALS_FILE`` names. Raises `StartupError`."""
        config = file_credentials(url)
        options: dict[str, str | timedelta] = {"timeout": _TIMEOUT, "read_timeout": _READ_TIMEOUT}
        for name in _CLIENT_OPTIONS:  # obstore takes them from nowhere else then
            key = f"aws_{name}"
            value = config.pop(key, os.environ.get(key.upper()))  # noqa: TID251 (of the store)
            if value is not None:
                options[name] = value
        try:
            store = from_url(  # type: ignore[call-overload]  # any store's
                url,
                config=config,
                client_options=options,
                retry_config={"retry_timeout": _RETRY_TIMEOUT},
            )
            return cls(store, outage)
        except (BaseError, ValueError) as error:
            raise StartupError(f"the URL of files cannot be used: {error}") from None

    @classmethod
    def in_directory(cls, path: Path, outage: StoreOutage | None = None) -> Self:
        """Raises `StartupError`."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return cls(LocalStore(path), outage)
        except (BaseError, OSError) as error:
            raise StartupError(f"{path} cannot be used: {error}") from None

    @property
    def directory(self) -> Path | None:
        """Where the blobs are, unless they are in an object store."""
        return _directory(self._store)

    def writer(self, name: str) -> BlobWriter:
        return BlobWriter(self._store, name, self._outage)

    async def parts(
        self, name: str, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to the end of the blob, or to before ``end``, which is not
        beyond the blob's end, in parts. Raises `Unavailable`, and `FileNotFoundError`, also between
        parts."""
        if end is None:
            end = (await self._reading(obstore.head_async(self._store, name)))["size"]
        for first in range(start, end, _READ_BYTES):
            last = min(first + _READ_BYTES, end)
            part = obstore.get_range_async(self._store, name, start=first, end=last)
            yield bytes(await self._reading(part))

    async def delete(self, name: str) -> None:
        """Delete a blob, if it exists. Raises `Unavailable`."""
        await _delete(self._store, name, self._outage)

    async def _reading(self, request: Awaitable[_Result]) -> _Result:
        """Raises like `parts`."""
        try:
            result = await request
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise _unreachable(error, self._outage, is_writing=False) from error
        self._outage.worked(is_writing=False)
        return result


def file_credentials(url: str) -> dict[str, str]:
    """The names and values of the section ``[default]`` of AWS's credentials file, if it is named.
    obstore does not read it. Raises `StartupError`."""
    named = os.environ.get(_CREDENTIALS_FILE, "")  # noqa: TID251 (of the store)
    if not named or not url.startswith(_S3):
        return {}
    path = Path(named).expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(secret_in(path))
        return dict(parser["default"])
    except (configparser.Error, KeyError):  # their messages have parts of the file
        raise StartupError(
            f"{path} has no section [default] with lines such as aws_access_key_id = ID"
        ) from None


async def _delete(store: ObjectStore, name: str, outage: StoreOutage) -> None:
    try:
        with suppress(FileNotFoundError):
            await obstore.delete_async(store, name)
        directory = _directory(store)
        if directory is not None:
            await asyncio.to_thread(_delete_unfinished, directory, name)
    except (BaseError, OSError) as error:
        raise _unreachable(error, outage) from error


def _directory(store: ObjectStore) -> Path | None:
    """The directory of a local store."""
    return store.prefix if isinstance(store, LocalStore) else None


def _delete_unfinished(directory: Path, name: str) -> None:
    """Delete what a process that was killed had written of a blob: the local store writes into
    NAME#1, or the next number that is free, and renames it at the end."""
    with suppress(FileNotFoundError):
        for number in itertools.count(1):
            (directory / f"{name}#{number}").unlink()


def _sync(directory: Path, name: str) -> None:
    """Make a blob outlast a loss of power. The local store does not do it. Raises `OSError`."""
    for path in (directory / name, directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unreachable(error: Exception, outage: StoreOutage, *, is_writing: bool = True) -> Unavailable:
    outage.failed(reason_of(error), is_writing=is_writing)
    return Unavailable("The storage of files is unreachable.")
