"""Connections to addresses that were checked, so that a webhook cannot reach private networks
through the gateway.

A name is resolved once for each connection. All its addresses are checked, and the connection goes
to a checked address, so the name cannot change its address in between (DNS rebinding).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

import httpcore

IpAddress: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host. Raises `OSError`."""

_PLATFORMS = (ip_network("168.63.129.16"), ip_network("192.0.0.0/24"))
"""Services of Azure at a public address, and addresses of protocols, with Oracle's metadata among
them, which some versions of Python call global."""
_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")
_TRY_S = 2.5
"""Seconds for a connection to an address if there are others."""


class AddressRefused(Exception):
    """The host has an address that is neither public nor in an allowed network."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the operating system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: IpAddress) -> bool:
    """Whether the Internet routes the address. An address that embeds an IPv4 address is public if
    the IPv4 address is public."""
    if isinstance(address, IPv6Address) and (embedded := _embedded(address)) is not None:
        return is_public(embedded)
    is_unicast = address in _UNICAST if address.version == 6 else not address.is_multicast
    is_platform = any(address in network for network in _PLATFORMS)
    return address.is_global and is_unicast and not is_platform


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The address behind an IPv4-mapped, 6to4, Teredo or NAT64 address."""
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to the addresses of ``networks``, and to public addresses unless ``is_private``.
    ``Host`` and TLS keep the name of the host."""

    def __init__(
        self, networks: Collection[Network], resolve: Resolve, *, is_private: bool = False
    ) -> None:
        self._networks = networks
        self._resolve = resolve
        self._is_private = is_private
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (httpcore's interface)
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `AddressRefused`, `httpcore.ConnectError` and `httpcore.ConnectTimeout`."""
        failure: Exception = httpcore.ConnectError("the name has no address")
        addresses = await self._checked(host, port)
        for address in addresses:
            limit_s = timeout if address == addresses[-1] else _TRY_S
            try:
                return await self._backend.connect_tcp(
                    address, port, limit_s, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _checked(self, host: str, port: int) -> list[str]:
        try:
            addresses = [ip_address(text) for text in await self._resolve(host, port)]
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError("the name cannot be resolved") from error
        if not all(map(self._is_allowed, addresses)):
            raise AddressRefused
        return [str(address) for address in dict.fromkeys(addresses)]

    def _is_allowed(self, address: IpAddress) -> bool:
        plain = address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
        if any(plain in network for network in self._networks):
            return True
        return not self._is_private and is_public(address)
