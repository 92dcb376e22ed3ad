"""Limits on client connections: their number, what each may send before its request is parsed, and
the bytes that wait for a client that does not read.

All this happens before an API key is checked, so everything is bounded: the number of connections,
the bytes of a request's head, the time within which the head must arrive, and the bytes that are
buffered for the client.
"""

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network
from typing import Any

import httptools
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import http_error_response
from gateway.intake.shared_amount import SharedAmount
from gateway.metrics import Metrics
from shared.settings import GatewaySettings

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 64 << 10
_MAX_URL_BYTES = 8 << 10
_MAX_HEADERS = 128
_MAX_PIPELINED = 16
_HEAD_TIMEOUT_S = 10.0
_LINGER_S = 2.0
"""How long a refused client may go on sending; a connection that is closed earlier is reset, and
the client may lose the response."""
_PIECE_BYTES = 16 << 10
"""The parser is given pieces of this size, because it keeps a header until its end without a
callback."""
_IPV6_PREFIX_LEN = 64
"""The smallest network that a site is given. A single host may use all its addresses."""
_CHUNK_BYTES = 64 << 10
"""A client must take so much within the timeout of a send."""
_WITHOUT_CHUNKS = ("0.9", "1.0")
"""Versions of HTTP in which a response without a length ends with its connection."""


class Connections:
    """The open connections of a gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        max_connections: int,
        metrics: Metrics,
        send_timeout_s: float,
    ) -> None:
        """The process has file descriptors for ``max_connections``. A client must take a part of
        its response within ``send_timeout_s``."""
        self.send_timeout_s = send_timeout_s
        self._open = SharedAmount(min(settings.max_connections, max_connections))
        self._metrics = metrics

    def protocol(self, **uvicorns: Any) -> "BoundedProtocol":
        """The protocol of a new connection; uvicorn calls this instead of a class."""
        return BoundedProtocol(self, **uvicorns)

    def enter(self, address: str) -> str | None:
        """Count a connection until `leave`, or else return the limit that it exceeds."""
        if self._open.take(_source_of(address), 1):
            return None
        return "max_connections_per_address" if self._open.has(1) else "max_connections"

    def leave(self, address: str) -> None:
        self._open.give_back(_source_of(address), 1)

    def refuse(self, error: HTTPException, limit: str = "") -> bytes:
        """The response to a request or connection that is refused, which it counts. ``limit`` is
        the name of the limit that was reached, if any."""
        fields = {"reason": error.detail, "limit": limit} if limit else {"reason": error.detail}
        logger.debug("connection refused", extra=fields)
        response = http_error_response(error, self._metrics, limit=limit)
        lines = [b"HTTP/1.1 %d %s" % (error.status_code, _phrase(error.status_code))]
        lines += [b"%s: %s" % header for header in response.raw_headers]
        return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])


class BoundedProtocol(HttpToolsProtocol):
    """A connection. Heads that are too large or too slow are refused. A send returns once all bytes
    are passed to the operating system, so that a request lasts as long as the memory of its
    response; a client that does not read is disconnected."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all = connections
        self._address = ""
        self._is_counted = False
        self._is_refused = False
        self._is_in_head = False
        self._num_headers = 0
        """Header fields of the current request, trailers included."""
        self._num_header_bytes = 0
        self._num_open_bytes = 0
        """Bytes that the parser was given since it last completed a head or a part of a body."""
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._has_lost_bytes = False
        self._offers_upgrade = False
        """Whether the head that was just parsed offers another protocol."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._address = self.client[0] if self.client is not None else ""
        limit = self._all.enter(self._address)
        self._is_counted = limit is None
        if limit is None:
            self._set_deadline(_HEAD_TIMEOUT_S)
        else:  # at once: to linger would take the descriptors that are to be saved
            self._is_refused = True
            transport.write(self._all.refuse(_too_many(limit), limit))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_lost_bytes = self.flow.write_paused
        self._clear_deadline()
        self.resume_writing()
        if self._is_counted:
            self._all.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            refusal = self._parse(data[start : start + _PIECE_BYTES])
            if refusal is not None:
                self._refuse(refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._offers_upgrade = False
        self._num_headers = self._num_header_bytes = 0
        if self.cycle is not None and self.cycle.response_complete:
            self._set_deadline(_HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MAX_URL_BYTES:
            raise HTTPException(414, f"The URL exceeds {_MAX_URL_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > _MAX_HEAD_BYTES:
            raise _too_large()
        if self._num_headers > _MAX_HEADERS:
            raise HTTPException(431, f"There are more than {_MAX_HEADERS} headers.")
        if self._is_in_head:  # a trailer is no header of the request, which is being served
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_open_bytes = 0
        self._clear_deadline()
        # The parser counts CONNECT as an offer, too. uvicorn refuses its URL, which has no path.
        self._offers_upgrade = (
            self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        )
        if self._offers_upgrade:
            return  # `_parse` starts the request
        if len(self.pipeline) == _MAX_PIPELINED:
            raise HTTPException(429, f"More than {_MAX_PIPELINED} requests are pipelined.")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_open_bytes = 0
        if not self._offers_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The rest of a body that nobody reads has to arrive by then, too.
        if self.cycle.response_complete:
            self._set_deadline(_HEAD_TIMEOUT_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self._all.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["http_version"] in _WITHOUT_CHUNKS:
                send = _until_close(cycle, send)
            await app(scope, receive, partial(self._send, send))

        super()._start_asgi_task(cycle, serve)  # type: ignore[arg-type]

    async def _send(self, send: Send, message: Message) -> None:
        """Send a message in pieces that the client takes one after the other. Raises
        `ConnectionAbortedError` if it does not."""
        rest = memoryview(message.get("body", b""))
        while len(rest) > _CHUNK_BYTES:
            piece = {**message, "body": rest[:_CHUNK_BYTES], "more_body": True}
            await self._flush(send, piece)
            rest = rest[_CHUNK_BYTES:]
            message = {**message, "body": rest}
        await self._flush(send, message)

    async def _flush(self, send: Send, message: Message) -> None:
        await send(message)
        await self.flow.drain()
        if self._has_lost_bytes:
            raise ConnectionAbortedError("the client does not read")

    def _parse(self, piece: bytes) -> HTTPException | None:
        """Returns why the connection is refused, if it is."""
        self._num_open_bytes += len(piece)
        try:
            self._feed(piece)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback has raised
            if isinstance(cause, HTTPException):
                return cause
            return HTTPException(400, "This is not a valid HTTP request.")
        return _too_large() if self._num_open_bytes > _MAX_HEAD_BYTES else None

    def _feed(self, piece: bytes) -> None:
        """Give the parser a piece. Offers of other protocols, such as HTTP/2, are ignored: the
        parser stops after such a head, and a new parser reads the same head without the offer."""
        while piece:
            try:
                self.parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as offer:
                logger.debug("upgrade ignored")
                piece = self._head_without_upgrade() + piece[offer.args[0] :]
                self.parser = _new_parser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, error: HTTPException) -> None:
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if self._is_answering():
            self.transport.abort()  # an error would be read as part of the response
        else:
            self.transport.write(self._all.refuse(error))
            self.transport.write_eof()
            self._set_deadline(_LINGER_S)

    def _is_answering(self) -> bool:
        cycle = self.cycle
        is_half_sent = cycle is not None and cycle.response_started and not cycle.response_complete
        return bool(self.pipeline) or is_half_sent

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._is_refused:
            self.transport.abort()
        elif self._is_in_head:
            self._refuse(HTTPException(408, "The headers did not arrive in time."))
        else:
            self.transport.close()


def _new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser that has uvicorn's settings."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _until_close(cycle: RequestResponseCycle, send: Send) -> Send:
    """Send a response of unknown length without chunks, which only HTTP/1.1 has. uvicorn closes the
    connection after a response to an older version, which ends the response."""

    has_length = True

    async def send_until_close(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = b"content-length" in {name.lower() for name, _ in message["headers"]}
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # uvicorn compares the bytes that it sends with this length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_until_close


def _source_of(address: str) -> str:
    """The source that the connections of an address count for: an IPv4 address, or the network of
    an IPv6 address."""
    if ":" not in address:
        return address
    ipv6 = IPv6Address(address.partition("%")[0])
    if ipv6.ipv4_mapped is not None:
        return str(ipv6.ipv4_mapped)
    return str(IPv6Network((int(ipv6), _IPV6_PREFIX_LEN), strict=False))


def _too_large() -> HTTPException:
    return HTTPException(431, f"The headers exceed {_MAX_HEAD_BYTES} bytes.")


def _too_many(limit: str) -> HTTPException:
    owner = "The gateway" if limit == "max_connections" else "Your address"
    return HTTPException(503, f"{owner} has too many connections.", {"Retry-After": "1"})


def _phrase(status: int) -> bytes:
    return HTTPStatus(status).phrase.encode()
