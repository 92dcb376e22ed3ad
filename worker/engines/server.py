"""The connection to an engine's server, and what its failures mean."""

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from shared.errors import EngineFailed, InvalidRequest
from worker.engines.adapter import EngineCall, Json

_CONNECT_S = 5.0
_QUESTION_S = 10.0
_HEALTH_S = 3.0
_MAX_REASON_CHARS = 300
_BUSY = (429, 503)
_REFUSED = (400, 413, 422)


class EngineAway(Exception):
    """The engine cannot be reached, so that no request has begun there."""


class EngineBusy(Exception):
    """The engine takes no request now, and may take it soon."""


class EngineServer:
    """An engine at a URL. Its two clients have the same settings: one asks questions from any
    thread, the other streams in the engine's thread."""

    def __init__(self, url: str, api_key: str | None, silence_s: float) -> None:
        """``silence_s`` is how long a stream may be silent."""
        self.url = url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "trust_env": False,  # a proxy of the environment must not see prompts
        }
        self._stream_timeout = httpx.Timeout(silence_s, connect=_CONNECT_S)
        self._questions = httpx.Client(**self._options, timeout=_QUESTION_S)
        self._lock = threading.Lock()
        self._num_open = 0
        """Questions without an answer yet."""
        self._is_closed = False

    def get(self, path: str) -> Json:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Json) -> Json:
        return self._ask("POST", path, body)

    def is_healthy(self, path: str) -> bool:
        try:
            with self._question():
                response = self._questions.get(path, timeout=_HEALTH_S)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    def open(self) -> httpx.AsyncClient:
        """The client for streams. As many run at once as the engine has slots."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(**self._options, timeout=self._stream_timeout, limits=limits)

    def close(self) -> None:
        """Returns at once. A question that another thread asks ends as it would have."""
        with self._lock:
            self._is_closed = True
        with self._question():
            pass

    @contextmanager
    def _question(self) -> Iterator[None]:
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                is_last = self._is_closed and self._num_open == 0
            if is_last:
                self._questions.close()

    def _ask(self, method: str, path: str, body: Json | None) -> Json:
        try:
            with self._question():
                response = self._questions.request(method, path, json=body)
        except httpx.TransportError as error:
            raise EngineAway(_reason(error)) from error
        if response.status_code in _BUSY:
            raise EngineAway(f"{path} answers {response.status_code}")
        if response.status_code != httpx.codes.OK:
            raise EngineFailed(f"{path} answers {response.status_code}: {_said(response.content)}")
        return _decoded(response.text)


async def events(client: httpx.AsyncClient, call: EngineCall) -> AsyncGenerator[Json, None]:
    """The events of a call's stream, each a JSON object.

    Raises `EngineAway` and `EngineBusy` before the engine has begun, `InvalidRequest` if it refuses
    the request, and `EngineFailed`.
    """
    try:
        async with client.stream("POST", call.path, json=call.body) as response:
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, await response.aread())
            if response.headers.get("content-type", "").startswith("application/json"):
                yield _decoded((await response.aread()).decode(errors="replace"))
                return
            async for line in response.aiter_lines():
                name, _, value = line.partition(":")
                if name == "error":
                    raise EngineFailed(f"The engine reports {value[:_MAX_REASON_CHARS]}")
                if name == "data" and value.strip() != "[DONE]":
                    event = _decoded(value)
                    if error := event.get("error"):
                        raise EngineFailed(f"The engine reports {_text_of(error)}")
                    yield event
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise EngineAway(_reason(error)) from error
    except httpx.TransportError as error:
        raise EngineFailed(f"The engine's stream broke: {_reason(error)}") from error


def _refusal(status: int, content: bytes) -> Exception:
    if status in _BUSY:
        return EngineBusy(f"the engine answers {status}")
    if status in _REFUSED:
        return InvalidRequest(f"The engine refuses the request: {_said(content)}")
    return EngineFailed(f"The engine answers {status}: {_said(content)}")


def _said(content: bytes) -> str:
    try:
        body = json.loads(content)
    except ValueError:
        return content[:_MAX_REASON_CHARS].decode(errors="replace")
    return _text_of(body.get("error", body) if isinstance(body, dict) else body)


def _text_of(error: object) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_REASON_CHARS]


def _decoded(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        raise EngineFailed("The engine's answer is not JSON.") from None
    if not isinstance(value, dict):
        raise EngineFailed("The engine's answer is not a JSON object.")
    return value


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
