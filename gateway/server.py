"""The gateway's HTTP server, and how it ends without failing a request."""

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from shared.errors import StartupError
from shared.settings import GatewaySettings

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 5


class Server(uvicorn.Server):
    """Serves an application that `opened` has opened."""

    def __init__(self, config: uvicorn.Config, lifespan: AsyncExitStack) -> None:
        super().__init__(config)
        self._lifespan = lifespan
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `serve` drain and return."""
        self._is_stopping.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`; then go on while the application drains, and return."""
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
        """Leave signals to the process."""
        yield


@contextmanager
def listen(settings: GatewaySettings) -> Iterator[socket.socket]:
    """Bind the address that the settings name. Raises `StartupError`, also where anybody could
    use it: without API keys it must be this machine's own, or be open on purpose."""
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        _check_secured(settings, str(address[0]))
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Connections inherit it. Without it each answer waits 40 ms for the client's late ACK:
        # asyncio sets it by itself only where the socket's protocol is spelled out.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None
    with listener:
        yield listener


def _check_secured(settings: GatewaySettings, address: str) -> None:
    is_secured = settings.keys_file is not None or settings.allow_anonymous
    if not is_secured and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise StartupError(
            f"{settings.host} is open to other machines, and nobody needs an API key: name a file "
            "with --keys-file, or say --allow-anonymous true"
        )


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def opened(app: FastAPI, settings: GatewaySettings) -> AsyncIterator[Server]:
    """Open ``app``'s resources; they close when the server stops, or at the latest here."""
    config = uvicorn.Config(
        app,
        lifespan="off",  # opened here: uvicorn would close it only after the last connection
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    async with AsyncExitStack() as lifespan:
        await lifespan.enter_async_context(app.router.lifespan_context(app))
        yield Server(config, lifespan)
