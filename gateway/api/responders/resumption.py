"""Streams that are there already: who comes back, and who cancels."""

import re

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.responders.disconnect import ClientGone, until_disconnect
from gateway.api.responders.event_stream import STREAM_HEADERS, EventStream, raise_failure
from gateway.log.cursor import NOT_FOUND, Departure
from gateway.log.framing import PING, Framer
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import StreamNotFound, WarrenError

_REPLAY_PAUSE_S = 0.1
"""A log that has said no more for so long has been read to where it is."""
_START = {"type": "http.response.start"}
_STREAM_ID = re.compile(r"[a-z]{1,16}-[0-9a-f]{32}")


def resume(
    gateway: Gateway, request_id: str, tenant: str | None, framer: Framer
) -> "ResumedStream":
    """The rest of a request's stream, as ``framer`` frames it, whichever gateway began it.

    ``tenant`` is whose request it must be; None: the right to it was proved. Raises
    `StreamNotFound` for what cannot be a request's id.
    """
    return ResumedStream(gateway, checked_id(request_id), tenant, framer)


async def cancel(gateway: Gateway, request_id: str, tenant: str | None) -> None:
    """Cancel a request and forget its answer, whichever gateway has it. Raises `StreamNotFound`,
    `StreamExpired`, `Unavailable` and `BusError`."""
    await gateway.relays.cancel(checked_id(request_id), tenant)


def checked_id(request_id: str) -> str:
    if _STREAM_ID.fullmatch(request_id) is None:
        raise StreamNotFound(NOT_FOUND)
    return request_id


class ResumedStream(Response):
    """Answers with the rest of a stream; 204 where there is none. Errors of the log are raised
    until the first byte is sent."""

    def __init__(
        self, gateway: Gateway, request_id: str, tenant: str | None, framer: Framer
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._request_id = request_id
        self._tenant = tenant
        self._framer = framer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._gateway.admission.admit():
            async with self._gateway.relays.resume(self._request_id, self._tenant) as relay:
                self._gateway.metrics.resumed.inc()
                try:
                    await self._stream(relay, receive, send)
                    relay.close(Departure.SERVED)
                except ClientGone:
                    relay.close(Departure.LEFT)
                except WarrenError:
                    relay.close(Departure.LEFT)
                    raise

    async def _stream(self, relay: LogRelay, receive: Receive, send: Send) -> None:
        stream = EventStream(relay, self._gateway.settings, self._framer)
        async with until_disconnect(receive):
            data = await self._first(relay, stream)
            if not relay.is_ended:
                await send({**_START, "status": 200, "headers": STREAM_HEADERS})
                last = await stream.send_all(data, send)
            else:
                last = data + stream.end()
                if self._framer.has_sent:
                    await send({**_START, "status": 200, "headers": STREAM_HEADERS})
                else:
                    await send({**_START, "status": 204, "headers": []})
                    last = b""
        await stream.send_last(last, send)

    async def _first(self, relay: LogRelay, stream: EventStream) -> bytes:
        """What the client has not seen yet, or a ping if that takes too long; nothing if it is not
        there before the log's end."""
        data, timeout_s = b"", self._gateway.settings.first_event_timeout_s
        while not data and not relay.is_ended:
            items = await relay.take(timeout_s)
            if relay.facts is None:
                raise_failure(items)
            data = stream.word(items) if items else PING
            timeout_s = _REPLAY_PAUSE_S
        return data
