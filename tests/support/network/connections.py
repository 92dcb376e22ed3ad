"""A server that leaves no connection open."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]
"""Serves one connection, which is closed once it returns."""


@asynccontextmanager
async def serving(
    serve: Serve, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve connections to a free port, which is returned; all of them are closed at the end."""
    connections: set[asyncio.Task[None]] = set()

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(serve_and_close(reader, writer))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
