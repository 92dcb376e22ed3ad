"""A connection to the broker that is reopened whenever it is lost, at the broker's next address."""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aio_pika
from aiormq import Channel, Connection
from aiormq.abc import AbstractConnection
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from shared.bus.outage import Outage
from shared.bus.rabbit.addresses import Address, Addresses
from shared.bus.rabbit.encoding import AMQP_FAILURES, is_asked_for, translated
from shared.bus.rabbit.frames import FrameStream, FrameTransport, MessageFrames, Outbox
from shared.bus.rabbit.shielded_calls import Calls
from shared.errors import (
    BusError,
    BusUnavailable,
    NoFreeChannel,
    PublishersBlocked,
    StartupError,
)
from shared.telemetry import incidents
from shared.telemetry.metrics import PROCESS

DEFAULT_USER = "guest"
"""The user of a URL that names none."""
_HEARTBEAT_S = 5
_RECONNECT_S = (0.3, 1.0)
_MOVE_S = (0.0, 0.1)
"""Before the next address after a connection that had lasted: all clients of a node lose it at the
same moment."""
_LASTED_S = 1.0
_OPEN_TIMEOUT_S = 5.0
_SETTLES_S = 15.0
"""Seconds for two attempts that time out and a third attempt that succeeds."""
_HIGHEST_CHANNEL = 65535
_CHANNEL_PAUSE_S = 0.05
_MAX_UNREAD_BYTES = 32 << 20
"""Bytes on their way to a broker that does not read them, from which on nothing more is published.
aiormq never waits for its transport."""
_EXHAUSTED_INTERVAL_S = 10.0
"""Seconds between two reports of a connection without a free channel."""

_REFUSALS = (AuthenticationError, ProbableAuthenticationError, InvalidFrameError)
"""aiormq reports a refused virtual host as `InvalidFrameError`, like frames it cannot expect."""

# aiormq drops its answer to a channel that the broker closes if its buffer is full. The broker then
# has that channel still, and ends the connection when the number comes up again. The size bounds
# nothing: aiormq passes on to the transport's buffer, which grows.
Connection.FRAME_BUFFER_SIZE = 0
# A connection is given up after 7.5 s of silence, not 18. RabbitMQ sends a heartbeat after each
# half of the interval in which it sent nothing else, so it may be silent for 5 s, and longer if it
# is busy. The factor is multiplied with seconds, so it need not be an integer.
Connection.HEARTBEAT_GRACE_MULTIPLIER = 1.25  # type: ignore[assignment]

_exhaustions = PROCESS.counter(
    "warren_broker_channels_exhausted_total",
    "Times, at most one in 10 seconds, that a connection to the broker had no free channel.",
)
logger = logging.getLogger(__name__)

OpenChannel = Callable[[], Awaitable[Channel]]
Restore = Callable[[OpenChannel], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What an open connection reads and sends beside aiormq."""

    transport: FrameTransport
    stream: FrameStream
    outbox: Outbox


class Link:
    """Keeps a connection open until `close`."""

    def __init__(
        self,
        urls: Sequence[URL],
        *,
        name: str,
        timeout_s: float,
        restore: Restore | None = None,
        first: Address | None = None,
    ) -> None:
        """``restore`` prepares each new connection before it is used; ``timeout_s`` limits the time
        of each call. To open a connection, to close it, and to wait for a broker that does not read
        takes at most 5 s of it. ``first`` is the address to try first."""
        named = [
            url.update_query({"heartbeat": _HEARTBEAT_S, **url.query, "name": name}) for url in urls
        ]
        self._timeout_s = min(timeout_s, _OPEN_TIMEOUT_S)
        self._addresses = Addresses(named, self._timeout_s, first)
        self._log_fields = {"broker": "", "link": name}
        self._address: Address | None = None
        """The address that was taken last."""
        self._failures: dict[str, str] = {}
        """Why the addresses could not be used that were tried since the last connection."""
        self.calls = Calls(timeout_s)
        """The calls over this link."""
        self._restore = restore
        self._connection: Connection | None = None
        self._beside: dict[AbstractConnection, _Beside] = {}
        self._connected = asyncio.Event()
        self._came_back_at = -math.inf  # infinite while a lost connection has not been reopened
        self._last_number = 0
        self._exhausted_at = -math.inf
        self._outage = Outage(self._log_fields)
        self._supervisor: asyncio.Task[None] | None = None
        self._broken: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        """Stops the supervisor even if aiormq swallows its cancellation."""

    async def open(self) -> None:
        """Return when connected, or when each address was tried; in that case retries continue in
        the background.

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

    def is_connected_to(self, address: Address) -> bool:
        return self.is_connected and self._address == address

    async def find_home(self) -> Address | None:
        """The first address, if this link is connected to another address."""
        return await self._addresses.find_home() if self.is_connected else None

    async def reopen(self, *, is_silent: bool = False) -> None:
        """Close the connection; another connection is opened. ``is_silent``: the node does not
        answer, so the link does not return to it."""
        if is_silent:
            self._addresses.stay()
        if self._connection is not None:
            with suppress(*AMQP_FAILURES):
                async with asyncio.timeout(self._timeout_s):
                    await self._connection.close()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    @property
    def has_several_addresses(self) -> bool:
        return self._addresses.num_known > 1

    @property
    def is_settled(self) -> bool:
        """Whether the connection is the link's first, or has been up for `_SETTLES_S` after a
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

    @property
    def max_channels(self) -> int:
        """The most channels that the broker allows on this connection."""
        connection = self._connection
        return _HIGHEST_CHANNEL if connection is None else _max_channels(connection)

    @property
    def is_blocked(self) -> bool:
        """Whether the broker reads nothing that is published."""
        return self._connection is not None and not self._is_read(self._connection)

    async def wait_connected(self) -> None:
        while not self.is_connected:
            self._connected.clear()
            await self._connected.wait()

    async def wait_writable(self) -> None:
        """Return when the broker reads what is sent. Raises `BusUnavailable` if it does not for too
        long."""
        connection = self._connection
        if connection is None:
            raise self._unavailable()
        if self._is_read(connection):
            return
        transport = self._beside[connection].transport
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.ready()
                await transport.wait_read()
        except TimeoutError:
            raise PublishersBlocked("the broker has blocked publishers") from None
        except OSError:
            raise self._unavailable() from None

    async def open_channel(self, *, confirms: bool = False, waits: bool = True) -> Channel:
        """Open a channel; ``waits`` for a free channel. Raises `BusUnavailable`.

        The caller must be neither cancelled nor timed out: see `shared.bus.rabbit.shielded_calls`.
        """
        if self._connection is None:
            raise self._unavailable()
        return await self._open_channel(self._connection, confirms=confirms, waits=waits)

    def listen(self, channel: Channel, frames: MessageFrames) -> None:
        """Give the messages that arrive on a channel to ``frames``."""
        beside = self._beside.get(channel.connection)
        if beside is None:  # the connection is lost
            frames.end()
        else:
            beside.stream.listen(channel.number, frames)

    def send(self, channel: Channel, frames: bytes) -> None:
        """Send frames on a channel; no effect if its connection is lost."""
        beside = self._beside.get(channel.connection)
        if beside is not None:
            beside.outbox.send(frames)

    async def _supervise(self, attempted: asyncio.Event) -> None:
        """Keep a connection. ``attempted`` is set once connected, or once every address failed."""
        while not self._stopped.is_set():
            self._address = address = await self._addresses.take()
            self._log_fields["broker"] = str(address)
            pause_s = (0.0, 0.0)
            try:
                async with self._connection_to_use(address) as connection:
                    attempted.set()
                    lasted_s = await self._lost(connection)
                await self._addresses.begin_again()
                may_move = lasted_s > _LASTED_S and self._addresses.has_several_left
                pause_s = _MOVE_S if may_move else _RECONNECT_S
            except _REFUSALS as error:
                if not attempted.is_set() and _is_refusal(error):
                    attempted.set()
                    raise StartupError(_refusal(address.url, error)) from error
                self._fail(error, is_refused=_is_refusal(error))
            except (BusError, *AMQP_FAILURES, asyncio.CancelledError) as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - reported, and another connection is made
                self._failures[str(address)] = type(error).__name__
                incidents.report(
                    "connection", "broker connection failed", error, **self._log_fields
                )
            if self._addresses.is_round_over:
                attempted.set()
                pause_s = _RECONNECT_S
            with suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(*pause_s)):  # noqa: S311
                    await self._stopped.wait()

    @asynccontextmanager
    async def _connection_to_use(self, address: Address) -> AsyncIterator[Connection]:
        # `aio_pika.connect` leaves a failed connection to the garbage collector, which may run in a
        # thread without an event loop, where the connection cannot be closed.
        handle = aio_pika.Connection(address.url.with_host(address.host))
        handle.kwargs["transport_factory"] = transport = FrameTransport(_MAX_UNREAD_BYTES)
        if address.url.scheme == "amqps":
            handle.kwargs["server_hostname"] = address.url.host  # what its certificate is for
        try:
            await handle.connect(timeout=self._timeout_s)
            assert handle.transport is not None
            connection = handle.transport.connection
            assert isinstance(connection, Connection)
            assert transport.stream is not None
            outbox = Outbox(connection.write_queue)
            self._beside[connection] = _Beside(transport, transport.stream, outbox)
            if self._restore is not None:
                restoring = self._restore(partial(self._open_channel, connection, waits=False))
                await self.calls.run(restoring, "restore queues")
            self._connection = connection
            if self._came_back_at == math.inf:
                self._came_back_at = time.monotonic()
            self._connected.set()
            self._outage.ended()
            self._failures.clear()
            yield connection
        finally:
            self._connection = None
            with suppress(*AMQP_FAILURES):
                async with asyncio.timeout(self._timeout_s):
                    await handle.close()
            self.calls.end()
            for beside in self._beside.values():
                beside.stream.end()
            self._beside.clear()

    async def _lost(self, connection: Connection) -> float:
        """Return when the connection is closed; returns the seconds that it lasted."""
        since = time.monotonic()
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
        return time.monotonic() - since

    async def _open_channel(
        self, connection: Connection, *, confirms: bool = False, waits: bool = True
    ) -> Channel:
        if connection.is_closed:
            raise BusUnavailable("the connection to the broker was lost")
        number = await self._free_number(connection, self._timeout_s if waits else 0.0)
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

    async def _free_number(self, connection: Connection, patience_s: float) -> int:
        """Wait for a free channel number. Raises `NoFreeChannel` if there is none for too long."""
        give_up_at = time.monotonic() + patience_s
        while (number := self._next_number(connection)) is None:
            if self._exhausted_at < time.monotonic() - _EXHAUSTED_INTERVAL_S:
                self._exhausted_at = time.monotonic()
                _exhaustions.inc()
                facts = {**self._log_fields, "channels": len(connection.channels)}
                logger.warning("no free channel", extra=facts)
            if time.monotonic() >= give_up_at:
                raise NoFreeChannel("all channels of the connection are in use")
            await asyncio.sleep(_CHANNEL_PAUSE_S)
            if connection.is_closed:
                raise BusUnavailable("the connection to the broker was lost")
        return number

    def _is_read(self, connection: Connection) -> bool:
        return _is_ready(connection) and self._beside[connection].transport.is_read

    def _next_number(self, connection: Connection) -> int | None:
        """Return the next free channel number; None if all are in use.

        aiormq's own choice increases while channels overlap, and eventually exceeds the broker's
        limit.
        """
        highest = _max_channels(connection)
        for _ in range(highest):
            self._last_number = self._last_number % highest + 1
            if self._last_number not in connection.channels:
                return self._last_number
        return None

    def _unavailable(self) -> BusUnavailable:
        tried = "; ".join(f"{address}: {reason}" for address, reason in self._failures.items())
        return BusUnavailable(f"not connected to the broker{tried and f' ({tried})'}")

    def _fail(self, error: BaseException, *, is_refused: bool = False) -> None:
        """Record why an address cannot be used; report it once all were tried."""
        if self._stopped.is_set():
            return
        self._failures[str(self._address)] = f"{type(error).__name__}: {error}"
        if self._addresses.is_round_over:
            self._log_fields["broker"] = ", ".join(self._failures)
            problem = "the broker refuses the login" if is_refused else "broker unreachable"
            self._outage.failed(problem, self._unavailable())


def _max_channels(connection: Connection) -> int:
    return connection.connection_tune.channel_max or _HIGHEST_CHANNEL


def _is_ready(connection: Connection) -> bool:
    """Whether `Connection.ready` returns without waiting."""
    waiting = connection.ready()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


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
