"""An endpoint of webhooks, on a real port, and events for it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import openai

from gateway.store.batches import Batches, BatchRecord, Order
from gateway.store.files.records import Files
from tests.support import PATIENCE_S
from tests.support.network.connections import serving

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FAILED = b"HTTP/1.1 500 Failed\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True)
class Received:
    target: str
    headers: dict[str, str]
    """By their names in lower case."""
    body: bytes

    def unwrapped(self, secret: str) -> Any:
        """The event, as OpenAI's client verifies and reads it."""
        client = openai.OpenAI(api_key="none")
        return client.webhooks.unwrap(self.body, self.headers, secret=secret)


@dataclass
class Receiver:
    """Answers each request with the first of the remaining ``answers``, of which the last is
    kept."""

    port: int = 0
    answers: list[bytes] = field(default_factory=lambda: [OK])
    received: list[Received] = field(default_factory=list)
    is_endless: bool = False
    """Whether the answer has no end."""
    holds: int = 0
    """How many requests are not answered before `release`."""
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def wait(self, number: int = 1) -> list[Received]:
        """Wait for so many requests; returns all that have arrived."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.received) < number:
                self._arrived.clear()
                await self._arrived.wait()
        return self.received

    def release(self) -> None:
        self._released.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.partition(": ") for line in lines if line)
            headers = {name.lower(): value for name, _, value in pairs}
            body = await reader.readexactly(int(headers["content-length"]))
            self.received.append(Received(first.split()[1], headers, body))
            self._arrived.set()
            if len(self.received) <= self.holds:
                await self._released.wait()
            writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
            while self.is_endless:
                writer.write(b"x" * 65536)
                await writer.drain()
            await writer.drain()


@asynccontextmanager
async def receiving(
    host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    async with serving(receiver.serve, host, tls) as receiver.port:
        yield receiver


async def fail_a_batch(files: Files, batches: Batches, tenant: str = "") -> BatchRecord:
    """An event for the tenant's endpoints."""
    async with files.writing(tenant, "in.jsonl", "batch") as draft:
        pass
    await batches.create(tenant, Order("/v1/completions", draft.id, "24h", 86400))
    batch = await batches.claim({}, 60)
    assert batch is not None
    await batches.fail(batch.id, batch.fence, [])
    return batch
