"""A TCP proxy that tests can break."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from yarl import URL

_CHUNK_BYTES = 1 << 16

PassOn = Callable[[bytes], None]
"""Passes bytes on to the other end."""


class TcpProxy:
    """Forwards connections to the host of ``url``; its own ``url`` is otherwise the same.

    With ``tls``, clients connect to it over TLS.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._target = URL(url)
        self._port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s = 0.0
        """The delay in each direction."""
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        self.resume()
        self.sever()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        url = self._target.with_host("127.0.0.1").with_port(self._port)
        return str(url.with_scheme("amqps") if self._tls else url)

    def close(self) -> None:
        """Refuse new connections for good."""
        assert self._server is not None
        self._server.close()

    def sever(self) -> None:
        """Reset all connections; new connections are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Drop everything silently, like a dead network."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            target = await asyncio.open_connection(self._target.host, self._target.port or 5672)
        except OSError:
            self._close(writer)
            return
        self._writers.add(target[1])
        to_target, to_client = self._directions(writer, target[1])
        async with asyncio.TaskGroup() as directions:
            directions.create_task(self._forward(reader, target[1], to_target))
            directions.create_task(self._forward(target[0], writer, to_client))

    def _directions(
        self, client: asyncio.StreamWriter, target: asyncio.StreamWriter
    ) -> tuple[PassOn, PassOn]:
        """Process bytes on their way to the target, or on their way to the client."""
        return target.write, client.write

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pass_on: PassOn
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                pass_on(data)
                await writer.drain()
        self._close(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._writers.discard(writer)
