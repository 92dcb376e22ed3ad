"""A connection to the broker that is reopened whenever it is lost."""

import asyncio
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aio_pika
from aiormq import Channel, Connection
from aiormq.connection import DEFAULT_PORTS
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from shared import incidents
from shared.bus.outage import Outage
from shared.bus.rabbit.encoding import AMQP_FAILURES, is_asked_for, translated
from shared.bus.rabbit.shielded_calls import Calls
from shared.errors import BusError, BusUnavailable, StartupError

DEFAULT_USER = "guest"
"""The user of a URL that names none."""
_HEARTBEAT_S = 5
_RECONNECT_S = (0.3, 1.0)
_SETTLES_S = 15.0
"""Seconds for two attempts that time out and one that succeeds."""
_HIGHEST_CHANNEL = 65535

_LOST_HALF = re.compile(r"[/?#].*@")
"""An @ after what ends the host: that character was meant to be part of the password."""
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")

_REFUSALS = (AuthenticationError, ProbableAuthenticationError, InvalidFrameError)
"""aiormq reports a refused virtual host as `InvalidFrameError`, like frames it cannot expect."""

# aiormq drops its answer to a channel that the broker closes if its buffer is full. The broker then
# has that channel still, and ends the connection when the number comes up again. The size bounds
# nothing: aiormq passes on to the transport's buffer, which grows.
Connection.FRAME_BUFFER_SIZE = 0

OpenChannel = Callable[[], Awaitable[Channel]]
Restore = Callable[[OpenChannel], Coroutine[Any, Any, None]]


def parse_url(url: str) -> URL:
    """Check a broker URL. Raises `StartupError`, without the URL, because it contains a
    password."""
    _, has_scheme, rest = url.partition("://")
    if has_scheme and (_LOST_HALF.search(rest) or _BAD_ESCAPE.search(rest)):
        raise StartupError(
            "the broker's URL contains a special character that is not escaped, probably in the "
            "password: write % as %25, / as %2F, ? as %3F, # as %23 and @ as %40"
        )
    try:
        parsed = URL(url)
    except ValueError:
        raise StartupError("the broker's URL cannot be read") from None
    if parsed.scheme not in DEFAULT_PORTS or not parsed.host:
        raise StartupError("the broker's URL must look like amqp://user:password@host:port/vhost")
    return parsed.with_port(parsed.port or DEFAULT_PORTS[parsed.scheme])


class Link:
    """Keeps one connection open until `close`."""

    def __init__(
        self,
        url: URL,
        *,
        name: str,
        timeout_s: float,
        restore: Restore | None = None,
    ) -> None:
        """``restore`` prepares each new connection before it is used; ``timeout_s`` limits the time
        to open a connection and to close it, and for each of its calls."""
        self._url = url.update_query({"heartbeat": _HEARTBEAT_S, **url.query, "name": name})
        self._log_fields = {"broker": f"{url.host}:{url.port}", "link": name}
        self.calls = Calls(timeout_s)
        """The calls over this link."""
        self._timeout_s = timeout_s
        self._restore = restore
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self._came_back_at = -math.inf  # infinite while a lost connection has not been reopened
        self._last_number = 0
        self._outage = Outage(self._log_fields)
        self._supervisor: asyncio.Task[None] | None = None
        self._broken: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        """Stops the supervisor even if aiormq swallows its cancellation."""

    async def open(self) -> None:
        """Return after the first attempt; if it failed, retries continue in the background.

        Raises `StartupError` if the broker refuses the login.
        """
        attempted = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(attempted))
        try:
            await attempted.wait()
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._supervisor.done():
            await self._supervisor

    async def close(self) -> None:
        self._stopped.set()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    @property
    def is_settled(self) -> bool:
        """Whether the connection is the first one, or has been up for `_SETTLES_S` after a
        reconnect."""
        return self.is_connected and time.monotonic() - self._came_back_at > _SETTLES_S

    @property
    def server(self) -> dict[str, str]:
        """What the broker says of itself, such as its ``product`` and ``version``; empty without a
        connection."""
        properties = self._connection.server_properties if self._connection is not None else {}
        return {name: value for name, value in properties.items() if isinstance(value, str)}

    @property
    def num_channels(self) -> int:
        return len(self._connection.channels) if self._connection is not None else 0

    async def wait_connected(self) -> None:
        while not self.is_connected:
            self._connected.clear()
            await self._connected.wait()

    async def wait_writable(self) -> None:
        """Return when the broker reads what is sent. Raises `BusUnavailable` if it does not for too
        long."""
        if self._connection is None:
            raise BusUnavailable("not connected to the broker")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.ready()
        except TimeoutError:
            raise BusUnavailable("the broker has blocked publishers") from None

    async def open_channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel. Raises `BusUnavailable`.

        The caller must be neither cancelled nor timed out: see `shared.bus.rabbit.shielded_calls`.
        """
        if self._connection is None:
            raise BusUnavailable("not connected to the broker")
        return await self._open_channel(self._connection, confirms=confirms)

    async def _supervise(self, attempted: asyncio.Event) -> None:
        is_first = True
        while not self._stopped.is_set():
            try:
                async with self._connection_to_use() as connection:
                    attempted.set()
                    await self._lost(connection)
            except _REFUSALS as error:
                if is_first and _is_refusal(error):
                    attempted.set()
                    raise StartupError(_refusal(self._url, error)) from error
                refused = "the broker refuses the login"
                problem = refused if _is_refusal(error) else "broker unreachable"
                self._outage.failed(problem, error)
            except (BusError, *AMQP_FAILURES, asyncio.CancelledError) as error:
                if not self._stopped.is_set():
                    self._outage.failed("broker unreachable", error)
            except Exception as error:  # noqa: BLE001 - reported, and another connection is made
                incidents.report(
                    "connection", "broker connection failed", error, **self._log_fields
                )
            attempted.set()
            is_first = False
            with suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(*_RECONNECT_S)):  # noqa: S311
                    await self._stopped.wait()

    @asynccontextmanager
    async def _connection_to_use(self) -> AsyncIterator[Connection]:
        # `aio_pika.connect` leaves a failed connection to the garbage collector, which may run in a
        # thread without an event loop, where the connection cannot be closed.
        handle = aio_pika.Connection(self._url)
        try:
            await handle.connect(timeout=self._timeout_s)
            assert handle.transport is not None
            connection = handle.transport.connection
            assert isinstance(connection, Connection)
            if self._restore is not None:
                restoring = self._restore(partial(self._open_channel, connection))
                await self.calls.run(restoring, "restore queues")
            self._connection = connection
            if self._came_back_at == math.inf:
                self._came_back_at = time.monotonic()
            self._connected.set()
            self._outage.ended()
            yield connection
        finally:
            self._connection = None
            with suppress(*AMQP_FAILURES):
                async with asyncio.timeout(self._timeout_s):
                    await handle.close()
            self.calls.end()

    async def _lost(self, connection: Connection) -> None:
        """Return when the connection is closed."""
        closing = connection.closing
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([closing, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        self._came_back_at = math.inf
        if not self._stopped.is_set():
            error = None if closing.cancelled() else closing.exception()
            self._outage.lost(error)

    async def _open_channel(self, connection: Connection, *, confirms: bool = False) -> Channel:
        if connection.is_closed:
            raise BusUnavailable("the connection to the broker was lost")
        number = self._free_number(connection)
        with translated("open a channel", connection):
            channel = await connection.channel(number, publisher_confirms=confirms)
        assert isinstance(channel, Channel)
        ended = partial(self._channel_ended, connection, is_long_lived=confirms)
        channel.closing.add_done_callback(ended)
        return channel

    def _channel_ended(
        self, connection: Connection, closing: "asyncio.Future[None]", *, is_long_lived: bool
    ) -> None:
        error = None if closing.cancelled() else closing.exception()
        if connection.is_closed or is_asked_for(error):
            return
        if is_long_lived:
            incidents.report("channel", "publishing channel ended", error, **self._log_fields)
        if not isinstance(error, AMQPError):
            # Its reader has died of a frame that it did not expect. The broker still has the
            # channel, and only a new connection has a state that both sides agree on.
            self._broken = asyncio.create_task(connection.close(error))

    def _free_number(self, connection: Connection) -> int:
        """Return the next free channel number.

        aiormq's own choice increases while channels overlap, and eventually exceeds the broker's
        limit.
        """
        highest = connection.connection_tune.channel_max or _HIGHEST_CHANNEL
        for _ in range(highest):
            self._last_number = self._last_number % highest + 1
            if self._last_number not in connection.channels:
                return self._last_number
        raise BusUnavailable("all channels of the connection are in use")


def _is_refusal(error: Exception) -> bool:
    return not isinstance(error, InvalidFrameError) or "Connection.Close" in str(error)


def _refusal(url: URL, error: Exception) -> str:
    """The broker's refusal of a connection as a sentence that says what to change."""
    place, user, vhost = f"{url.host}:{url.port}", url.user or DEFAULT_USER, url.path[1:] or "/"
    match error:
        case ProbableAuthenticationError():
            return (
                f"the broker at {place} refuses user {user!r}: its password is wrong, or there is "
                "no such user"
            )
        case InvalidFrameError():  # aiormq does not pass the broker's reason on
            return (
                f"the broker at {place} refuses the virtual host {vhost!r} at the end of the URL: "
                f"it does not exist, or user {user!r} has no permissions in it"
            )
        case _:
            return f"the broker at {place} refuses the connection: {error}"
