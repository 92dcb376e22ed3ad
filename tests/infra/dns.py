"""A DNS server that knows addresses for every name: what Docker's is to a proxy."""

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

_RESPONSE = 0x8180
_POINTER_TO_NAME = 0xC00C
_TYPE_A = 1
_CLASS_IN = 1
_TTL_S = 1


class DnsServer(asyncio.DatagramProtocol):
    """Answers every question for an IPv4 address with ``addresses``, which a test may change."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(answer(data, self.addresses), addr)


def answer(query: bytes, addresses: list[str]) -> bytes:
    """The response to a query with a single question."""
    end_of_name = query.index(b"\0", 12) + 1
    question = query[12 : end_of_name + 4]
    (kind,) = struct.unpack_from("!H", query, end_of_name)
    known = addresses if kind == _TYPE_A else []
    header = struct.pack("!2sHHHHH", query[:2], _RESPONSE, 1, len(known), 0, 0)
    records = [
        struct.pack("!HHHIH", _POINTER_TO_NAME, _TYPE_A, _CLASS_IN, _TTL_S, 4)
        + ipaddress.IPv4Address(address).packed
        for address in known
    ]
    return b"".join([header, question, *records])


@asynccontextmanager
async def dns_server(*addresses: str) -> AsyncIterator[tuple[DnsServer, int]]:
    """Run the server on a free port; yields it and the port."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: DnsServer(list(addresses)), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()
