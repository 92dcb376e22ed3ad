"""The connection to an engine's server: short questions, and the streams of sequences."""

import threading
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import httpx

from shared.errors import EngineFailed
from worker.engines.adapter import EngineCall, JsonObject
from worker.engines.answer import BUSY, EngineAway, EngineBusy, Patience, decoded, events, said

_QUESTION_S = 10.0
_HEALTH_S = 3.0
_REFUSED = (401, 403, 404)


class HealthReply(NamedTuple):
    """What a server's health path answers."""

    status: int | None
    """None: nothing."""
    reason: str
    is_reconnected: bool = False
    """Whether the server has closed a connection that it had kept for several looks, as it does
    when it ends: it may be another process now."""

    @property
    def is_healthy(self) -> bool:
        """A server that answers 429 has only been asked too often."""
        return self.status == httpx.codes.OK or self.is_busy

    @property
    def is_busy(self) -> bool:
        return self.status == httpx.codes.TOO_MANY_REQUESTS

    @property
    def is_refused(self) -> bool:
        """Whether waiting does not help: the key or the URL is wrong."""
        return self.status in _REFUSED


class EngineServer:
    """An engine at a URL. Questions may be asked in any thread; streams belong to the engine's
    thread."""

    def __init__(self, url: str, api_key: str | None, silence_s: float) -> None:
        """``silence_s`` is how long a stream that has begun may be silent."""
        self.url = str(httpx.URL(url).copy_with(userinfo=b""))
        """Without the credentials that it may contain."""
        self._patience = Patience(silence_s)
        self._security = httpx.create_ssl_context(trust_env=False)
        # A proxy of the environment must not see prompts.
        self._questions = httpx.Client(
            base_url=url,
            headers=_credentials(httpx.URL(url), api_key),
            timeout=_QUESTION_S,
            trust_env=False,
            verify=self._security,
        )
        self._lock = threading.Lock()
        self._num_open = 0
        """Questions without an answer yet."""
        self._is_closed = False
        self._connection: object = None
        """Of the last look."""
        self._num_looks = 0
        """Over this connection, in succession."""

    def get(self, path: str) -> JsonObject:
        return self._ask("GET", path, None)

    def post(self, path: str, body: JsonObject) -> JsonObject:
        return self._ask("POST", path, body)

    def look(self, path: str) -> HealthReply:
        """Ask the server how it is. One thread at a time may ask."""
        try:
            with self._question():
                response = self._questions.get(path, timeout=_HEALTH_S)
        except httpx.HTTPError as error:
            return HealthReply(None, _reason(error))
        connection = response.extensions["network_stream"].get_extra_info("socket")
        is_new = connection is not self._connection
        is_reconnected = is_new and self._num_looks > 1
        self._connection = connection
        self._num_looks = 1 if is_new else self._num_looks + 1
        reason = f"{path} answers {response.status_code}"
        return HealthReply(response.status_code, reason, is_reconnected)

    def events(
        self, call: EngineCall, max_prompt_len: int
    ) -> AsyncGenerator[Sequence[JsonObject], None]:
        """The events of a call's stream: see `answer.events`."""
        request = self._questions.build_request("POST", call.path, json=call.body)
        security = self._security if request.url.scheme == "https" else None
        return events(request, security, self._patience, max_prompt_len)

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

    def _ask(self, method: str, path: str, body: JsonObject | None) -> JsonObject:
        try:
            with self._question():
                response = self._questions.request(method, path, json=body)
        except httpx.TransportError as error:
            raise EngineAway(_reason(error)) from error
        except httpx.HTTPError as error:
            raise EngineFailed(f"{path} answers nonsense: {_reason(error)}") from error
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise EngineBusy(f"{path} answers {response.status_code}")
        if response.status_code in BUSY:
            raise EngineAway(f"{path} answers {response.status_code}")
        if response.status_code != httpx.codes.OK:
            raise EngineFailed(f"{path} answers {response.status_code}: {said(response.content)}")
        return decoded(response.content)


def _credentials(url: httpx.URL, api_key: str | None) -> dict[str, str]:
    if api_key is not None:
        return {"Authorization": f"Bearer {api_key}"}
    if url.userinfo:
        return {"Authorization": f"Basic {b64encode(unquote_to_bytes(url.userinfo)).decode()}"}
    return {}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
