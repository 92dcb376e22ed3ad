"""The HTTP client of a user: requests to any gateway, and streams that it may leave."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.errors import StreamExpired
from tests.support.deployment.processes import NO_TLS
from tests.system.chaos.callers import events
from tests.system.soak.answers import Answer, Gathering, answer_of
from tests.system.soak.questions import Question
from tests.system.soak.tally import Tally

PATIENCE_S = 90.0
LAST_EVENT_ID = "Last-Event-ID"
_WITH_IDS = {"Accept": "text/event-stream"}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

_WINDOW_BYTES = 4096
_UNAVAILABLE = 503
_RETRY_PAUSE_S = 0.1


class Refused(Exception):
    """The gateway responded with an error, before or within the stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.code = code


@dataclass
class Reading:
    """What a client has received of a stream."""

    stream_id: str = ""
    last_id: str | None = None
    is_ended: bool = False
    gathering: Gathering = field(default_factory=Gathering)

    @property
    def answer(self) -> Answer:
        return self.gathering.answer

    def take(self, event_id: str | None, data: str) -> None:
        """Raises `Refused` for an error."""
        if data == "[DONE]":
            self.is_ended = True
            return
        event = json.loads(data)
        if "error" in event:
            raise _refused(200, event)
        self.gathering.take(event)
        self.last_id = event_id or self.last_id


class OpenStream:
    """A stream whose connection is open."""

    def __init__(self, response: httpx.Response, reading: Reading) -> None:
        self._events = events(response)
        self._reading = reading

    async def read(self, num_events: int | None = None, *, pause_s: float = 0.0) -> None:
        """Read this many events, or to the stream's end, with a pause after each. Raises `Refused`
        for an error, even if the stream has no end."""
        num_left = num_events
        while num_left != 0 and not self._reading.is_ended:
            try:
                self._reading.take(*await anext(self._events))
            except StopAsyncIteration:
                raise Refused(200, "no_end", f"{self._reading.stream_id} has no end") from None
            num_left = None if num_left is None else num_left - 1
            if pause_s:
                await asyncio.sleep(pause_s)


class Client:
    """Sends each request to any of the gateways at ``urls``."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        narrow: httpx.AsyncClient,
        urls: Sequence[str],
        tally: Tally,
        dice: random.Random,
        *,
        retries: bool = False,
    ) -> None:
        """``narrow`` is that of `narrow_client`. With ``retries`` a request is sent again to any
        gateway for as long as it is answered with 503."""
        self._http = http
        self._urls = urls
        self._dice = dice
        self._narrow = narrow
        self._tally = tally
        self._retries = retries
        self.request_id = ""
        """The request id of the last response."""

    async def ask(self, question: Question, key: str | None = None, **more: Any) -> Answer:
        """Ask without streaming. Raises `Refused`."""
        headers = {} if key is None else {"Idempotency-Key": key}
        body = question.body | more
        response = await self._send("POST", question.path, json=body, headers=headers)
        return answer_of(response.json())

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send another kind of request with a JSON response. Raises `Refused`."""
        answer: dict[str, Any] = (await self._send("POST", path, json=body)).json()
        return answer

    async def delete(self, stream_id: str) -> None:
        """Cancel a request. Raises `Refused`."""
        await self._send("DELETE", f"/v1/streams/{stream_id}")

    @asynccontextmanager
    async def stream(
        self,
        question: Question,
        reading: Reading,
        *,
        has_ids: bool = False,
        key: str | None = None,
        is_narrow: bool = False,
        **more: Any,
    ) -> AsyncIterator[OpenStream]:
        """Open a stream; its connection is closed at the end of the ``async with``. Raises
        `Refused`."""
        headers = _WITH_IDS if has_ids else {}
        headers = headers if key is None else {**headers, "Idempotency-Key": key}
        body = question.body | _STREAMED | more
        http = self._narrow if is_narrow else self._http
        async with self._open("POST", question.path, http, json=body, headers=headers) as response:
            reading.stream_id = response.headers["x-request-id"]
            yield OpenStream(response, reading)

    @asynccontextmanager
    async def resume(self, reading: Reading) -> AsyncIterator[OpenStream]:
        """Resume a stream. Raises `Refused`."""
        self._tally.num_resumed += 1
        headers = {} if reading.last_id is None else {LAST_EVENT_ID: reading.last_id}
        path = f"/v1/streams/{reading.stream_id}"
        async with self._open("GET", path, headers=headers) as response:
            reading.is_ended = response.status_code == 204
            yield OpenStream(response, reading)

    async def is_kept(self, stream_id: str) -> bool:
        """Whether the stream can be resumed."""
        try:
            async with self._open("GET", f"/v1/streams/{stream_id}"):
                return True
        except Refused as error:
            if error.code != StreamExpired.code:
                raise
            return False

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        async with self._open(method, path, **more) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, http: httpx.AsyncClient | None = None, **more: Any
    ) -> AsyncIterator[httpx.Response]:
        http = http or self._http
        while True:
            self._tally.num_requests += 1
            async with http.stream(method, self._url(path), **more) as response:
                if not (self._retries and response.status_code == _UNAVAILABLE):
                    if response.is_error:
                        await response.aread()
                    self._check(response)
                    yield response
                    return
            self._tally.num_retried += 1
            await asyncio.sleep(_RETRY_PAUSE_S)

    def _check(self, response: httpx.Response) -> None:
        self.request_id = response.headers["x-request-id"]
        if response.is_error:
            raise _refused(response.status_code, response.json())

    def _url(self, path: str) -> str:
        return f"{self._dice.choice(self._urls)}{path}"


def narrow_client() -> httpx.AsyncClient:
    """A client with a small receive buffer, so that the gateway soon waits for it."""
    transport = httpx.AsyncHTTPTransport(
        verify=NO_TLS,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)],
    )
    return httpx.AsyncClient(timeout=PATIENCE_S, transport=transport)


def _refused(status: int, body: dict[str, Any]) -> Refused:
    return Refused(status, body["error"]["code"], body["error"]["message"])
