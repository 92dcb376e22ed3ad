"""The gateway's HTTP server, which shuts down without failing requests."""

import asyncio
import ipaddress
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from gateway.connections import Connections
from shared.errors import StartupError
from shared.settings import GatewaySettings

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 5
_KEEP_ALIVE_S = 5
"""Seconds between two requests of a connection."""
_OTHER_FILES = 256
"""File descriptors that are left for the broker, for logs and for other unlimited uses."""


class GatewayServer(uvicorn.Server):
    """Runs an application that was opened with `opened`."""

    def __init__(self, config: uvicorn.Config, lifespan: AsyncExitStack) -> None:
        super().__init__(config)
        self._lifespan = lifespan
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `serve` drain and return."""
        self._is_stopping.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`; continue while the application drains, then return."""
        serving = asyncio.create_task(super().serve(sockets))
        stopping = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._lifespan.aclose()
        finally:
            stopping.cancel()
            self.should_exit = True
            await serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to the process."""
        yield


@contextmanager
def listen(settings: GatewaySettings) -> Iterator[socket.socket]:
    """Bind the address of the settings. Raises `StartupError`, also if the gateway would be open to
    everyone: without API keys the address must be loopback, unless anonymous access is allowed."""
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        _check_secured(settings, str(address[0]))
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Connections inherit it. Otherwise each response waits 40 ms for the client's delayed ACK:
        # asyncio sets it by itself only if the socket's protocol is given explicitly.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        place = f"{settings.host}:{settings.port}"
        raise StartupError(
            f"cannot listen on {place}: {reason}; choose another address with --host and --port"
        ) from None
    with listener:
        yield listener


def _check_secured(settings: GatewaySettings, address: str) -> None:
    is_secured = settings.keys_file is not None or settings.allow_anonymous
    if not is_secured and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise StartupError(
            f"{settings.host} accepts requests from other machines, but no API keys are "
            "configured: set --keys-file, or --allow-anonymous"
        )


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def opened(app: FastAPI, settings: GatewaySettings) -> AsyncIterator[GatewayServer]:
    """Open ``app``'s resources. They are closed when the server stops, or at the end of this
    context."""
    num_files = _allow_files(settings.max_connections + _OTHER_FILES)
    max_connections = max(num_files - _OTHER_FILES, num_files // 2)
    connections = Connections(
        settings, max_connections, app.state.metrics, app.state.send_timeout_s
    )
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # it is only called
        lifespan="off",  # opened here, because uvicorn closes it too late
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    async with AsyncExitStack() as lifespan:
        await lifespan.enter_async_context(app.router.lifespan_context(app))
        yield GatewayServer(config, lifespan)


def _allow_files(num_files: int) -> int:
    """Raise the process's limit of open files to ``num_files``, or as far as it may be; returns the
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return num_files
    limit = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
