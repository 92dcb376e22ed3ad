"""The answer to a request, over a connection of its own.

Every token of every sequence passes here. HTTP is parsed in C, and all events of a read are decoded
together: with httpx, reading an event took twice the CPU time.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Sequence

import httptools
import httpx

from shared.errors import EngineFailed, InvalidRequest
from worker.engines.adapter import JsonObject

_CONNECT_S = 5.0
_SLOW_PROMPT_TOKENS_PER_S = 50.0
"""The tokens of prompts that the slowest server computes in a second."""
_MAX_REASON_CHARS = 300
BUSY = (429, 503)
"""The statuses of a server that takes no request now."""
_REFUSED = (400, 413, 422)
_ASKED = {"Connection": "close", "Accept-Encoding": "identity"}


class EngineAway(Exception):
    """The engine cannot be reached, so that no request has begun there."""


class EngineBusy(Exception):
    """The engine takes no request now, and may take it soon."""


class Patience:
    """How long the streams of a server may be silent.

    A stream that has begun may be silent for ``silence_s``. A stream that has not begun may wait
    for others: it fails once none of them has been heard for this time, and for the time in which
    a slow server computes the longest prompt.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.heard_at = 0.0
        """When anything arrived last in any of the streams."""

    def before_first_s(self, max_prompt_len: int) -> float:
        return self.silence_s + max_prompt_len / _SLOW_PROMPT_TOKENS_PER_S


async def events(
    request: httpx.Request,
    security: ssl.SSLContext | None,
    patience: Patience,
    max_prompt_len: int = 0,
) -> AsyncGenerator[Sequence[JsonObject], None]:
    """The events of a request's stream, each a JSON object, as many at once as have arrived.

    ``security`` is None if the request's URL is not of HTTPS. ``max_prompt_len`` are the tokens of
    the longest prompt that the server may compute before the first event. Raises `EngineAway` and
    `EngineBusy` before the engine has begun, `InvalidRequest` if it refuses the request, and
    `EngineFailed`, also if ``patience`` ends.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_S):
            transport, answer = await loop.create_connection(
                lambda: _Answer(patience, max_prompt_len),
                request.url.raw_host.decode(),
                request.url.port or (80 if security is None else 443),
                ssl=security,
            )
    except OSError as error:
        raise EngineAway(str(error) or type(error).__name__) from error
    try:
        transport.write(_encoded(request))
        await answer.begins()
        if answer.status != httpx.codes.OK:
            raise _refusal(answer.status, await answer.rest())
        if answer.is_json:
            yield [decoded(await answer.rest())]
            return
        unfinished = b""
        is_ended = False
        while not is_ended:
            content = await answer.read()
            is_ended = not content
            *lines, unfinished = (unfinished + (content or b"\n")).split(b"\n")
            arrived, failure = _events_in(lines)
            if arrived:
                yield arrived
            if failure is not None:
                raise failure
    finally:
        answer.close()
        transport.abort()


def said(content: bytes) -> str:
    """The reason in the body of a refusal."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return content[:_MAX_REASON_CHARS].decode(errors="replace")
    return _text_of(body.get("error", body) if isinstance(body, dict) else body)


def decoded(text: bytes) -> JsonObject:
    """A JSON object. Raises `EngineFailed`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise EngineFailed("The engine's answer is not JSON.") from None
    if not isinstance(value, dict):
        raise EngineFailed("The engine's answer is not a JSON object.")
    return value


def _encoded(request: httpx.Request) -> bytes:
    request.headers.update(_ASKED)
    fields = [b"%s: %s\r\n" % field for field in request.headers.raw]
    method = request.method.encode()
    head = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, request.url.raw_path, b"".join(fields))
    return head + request.content


def _refusal(status: int, content: bytes) -> Exception:
    if status in BUSY:
        return EngineBusy(f"the engine answers {status}")
    if status in _REFUSED:
        return InvalidRequest(f"The engine refuses the request: {said(content)}")
    return EngineFailed(f"The engine answers {status}: {said(content)}")


def _events_in(lines: Sequence[bytes]) -> tuple[Sequence[JsonObject], EngineFailed | None]:
    """The events in lines of a stream, and the failure that ends the stream after them."""
    found: list[JsonObject] = []
    try:
        for line in lines:
            found += _event_of(line)
    except EngineFailed as failure:
        return found, failure
    return found, None


def _event_of(line: bytes) -> Sequence[JsonObject]:
    """The event of a line, if the line has one."""
    name, _, value = line.partition(b":")
    if name == b"error":
        raise EngineFailed(f"The engine reports {said(value)}")
    if name != b"data" or value.strip() == b"[DONE]":
        return ()
    event = decoded(value)
    if error := event.get("error"):
        raise EngineFailed(f"The engine reports {_text_of(error)}")
    return (event,)


def _text_of(error: object) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_REASON_CHARS]


class _Answer(asyncio.Protocol):
    """Reads an answer. ``status`` and ``is_json`` are known once it has begun."""

    def __init__(self, patience: Patience, max_prompt_len: int) -> None:
        self.status = 0
        self.is_json = False
        self._patience = patience
        self._silence_s = patience.before_first_s(max_prompt_len)
        """How long it may be silent now."""
        self._has_content = False
        self._parser = httptools.HttpResponseParser(self)
        self._content: list[bytes] = []
        self._has_length = False
        self._has_begun = False
        self._is_complete = False
        self._error: EngineFailed | None = None
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._heard_at = time.monotonic()
        self._alarm = self._loop.call_later(self._silence_s, self._check_silence)

    async def begins(self) -> None:
        """Return once the status is known. Raises `EngineFailed`."""
        while not self._has_begun:
            await self._news()

    async def read(self) -> bytes:
        """What has arrived since the last call, and at least a byte; empty at the end. Raises
        `EngineFailed` after all that has arrived before the failure."""
        while not self._content and not self._is_complete:
            await self._news()
        content, self._content = b"".join(self._content), []
        return content

    async def rest(self) -> bytes:
        """All that has not been read yet."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Nobody reads any more."""
        self._alarm.cancel()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._reader = self._loop.create_future()
        await self._reader

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._patience.heard_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is not HTTP: {error}")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._has_begun and not self._has_length:
            self._is_complete = True  # the end of the connection is the end of the answer
        if not self._is_complete:
            self._fail(str(exc or "the connection was closed"))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, like the methods below."""
        match name.lower():
            case b"content-type":
                self.is_json = value.startswith(b"application/json")
            case b"content-length" | b"transfer-encoding":
                self._has_length = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_begun = self.status >= httpx.codes.OK

    def on_body(self, body: bytes) -> None:
        if not self._has_content:
            self._has_content = True
            self._silence_s = self._patience.silence_s
            self._alarm.cancel()
            self._alarm = self._loop.call_later(self._silence_s, self._check_silence)
        self._content.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_begun

    def _check_silence(self) -> None:
        heard_at = self._heard_at if self._has_content else self._patience.heard_at
        left_s = max(heard_at, self._heard_at) + self._silence_s - time.monotonic()
        if left_s > 0:
            self._alarm = self._loop.call_later(left_s, self._check_silence)
        else:
            self._fail(f"it was silent for {self._silence_s:g} s")
            self._wake()

    def _fail(self, reason: str) -> None:
        self._error = self._error or EngineFailed(f"The engine's stream broke: {reason}")

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
