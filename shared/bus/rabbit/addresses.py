"""The addresses of a broker's nodes: how they are written, and the order in which they are tried.

Each connection draws an order of its own, so that the clients of a cluster spread over its nodes.
"""

import asyncio
import random
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from aiormq.connection import DEFAULT_PORTS
from yarl import URL

from shared.errors import StartupError

_EXAMPLE = "amqp://user:password@host:port/vhost"
_NEXT_URL = re.compile(r",\s*(?=[a-z]+://)")
"""A comma between two URLs. A comma may also be part of a password."""

_LOST_HALF = re.compile(r"[/?#].*@")
"""An @ after what ends the host: that character was meant to be part of the password."""
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def parse_urls(text: str) -> tuple[URL, ...]:
    """Check the broker's URLs, which commas separate.

    Raises `StartupError`, without the URLs, because they contain passwords.
    """
    urls = tuple(_parse_url(url.strip()) for url in _NEXT_URL.split(text))
    if len({(url.user, url.path) for url in urls}) > 1:
        raise StartupError("the broker's URLs must name the same user and the same virtual host")
    return urls


def _parse_url(text: str) -> URL:
    _, has_scheme, rest = text.partition("://")
    if has_scheme and (_LOST_HALF.search(rest) or _BAD_ESCAPE.search(rest)):
        raise StartupError(
            "the broker's URL contains a special character that is not escaped, probably in the "
            "password: write % as %25, / as %2F, ? as %3F, # as %23 and @ as %40"
        )
    try:
        url = URL(text)
    except ValueError:
        raise StartupError("the broker's URL cannot be read") from None
    if url.scheme not in DEFAULT_PORTS or not url.host:
        raise StartupError(f"the broker's URL must look like {_EXAMPLE}")
    try:
        url.host.encode("idna")
    except UnicodeError as error:
        raise StartupError(f"the broker's host {url.host!r} is no name: {error}") from None
    return url.with_port(url.port or DEFAULT_PORTS[url.scheme])


@dataclass(frozen=True, slots=True)
class Address:
    """An address to connect to: ``host`` is the IP address, or the URL's host if that has none."""

    url: URL
    host: str

    def __str__(self) -> str:
        """The address without user and password."""
        place = f"{self.url.host}:{self.url.port}"
        return place if self.host == self.url.host else f"{place} ({self.host})"


class Addresses:
    """The order in which a connection tries the addresses of a broker."""

    def __init__(self, urls: Sequence[URL], timeout_s: float, first: Address | None = None) -> None:
        """``timeout_s`` limits the time to resolve a name. ``first`` is tried first."""
        self._urls = urls
        self._timeout_s = timeout_s
        self._first = first
        self._left: list[Address] = []
        self._last: Address | None = None
        self._home: Address | None = None
        self.num_known = 0
        """How many addresses there were when the last round began."""

    @property
    def is_round_over(self) -> bool:
        """Whether every address has been tried since the start or the last connection."""
        return not self._left

    @property
    def has_several_left(self) -> bool:
        """Whether this round has several addresses left."""
        return len(self._left) > 1

    async def take(self) -> Address:
        """The next address. Names are resolved again after every round."""
        if not self._left:
            self._left = await self._shuffled()
            self._left.sort(key=lambda address: address != self._first)
            self._first = None
        self._last = self._left.pop(0)
        self._home = self._home or self._last
        return self._last

    async def begin_again(self) -> None:
        """Begin another round, which ends with the address that was taken last."""
        lost = self._last
        found = await self._shuffled()
        self._left = sorted(found, key=lambda address: address == lost)

    async def find_home(self) -> Address | None:
        """The address that was taken first, if another address was taken last and names still
        stand for both."""
        found = await self._resolved()
        if self._home not in found and self._last in found:
            self._home = self._last
        is_elsewhere = self._home in found and self._last in found and self._home != self._last
        return self._home if is_elsewhere else None

    def stay(self) -> None:
        """Regard the address that is taken next as the first address."""
        self._home = None

    async def _shuffled(self) -> list[Address]:
        found = await self._resolved()
        random.shuffle(found)
        self.num_known = len(found)
        return found

    async def _resolved(self) -> list[Address]:
        resolving = [_resolved(url, self._timeout_s) for url in self._urls]
        found = [address for some in await asyncio.gather(*resolving) for address in some]
        return list(dict.fromkeys(found))


async def _resolved(url: URL, timeout_s: float) -> list[Address]:
    """All addresses of a host, or its name if they are unknown: connecting to it then says why."""
    assert url.host is not None
    with suppress(ValueError):
        ip_address(url.host)
        return [Address(url, url.host)]
    loop = asyncio.get_running_loop()
    with suppress(OSError, UnicodeError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        return [Address(url, str(address[0])) for *_, address in found]
    return [Address(url, url.host)]
