"""A conversation with an OpenAI-compatible server. Answers survive the loss of a gateway."""

import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console

from cli.gateway_client import (
    CONNECT_TIMEOUT_S,
    ServerError,
    as_error,
    connect,
    error_of,
    key_problem,
    lines_of,
    unanswered,
)
from cli.terminal import notices
from shared.errors import (
    InternalError,
    InvalidApiKey,
    PermissionDenied,
    StartupError,
    Unavailable,
    WarrenError,
)
from shared.printable import escape_controls

PATIENCE_S = 60.0
"""How long a lost answer is looked for; a gateway keeps it as long."""
_PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)
_CANCEL_TIMEOUT_S = 2.0


class _Lost(Exception):
    """The connection, or the gateway behind it, was lost; the answer may still be there."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The fields of a chunk that a conversation needs."""

    choices: list[_ChunkChoice] = []
    error: ServerError | str | None = None


class _Event(NamedTuple):
    id: str
    data: str


@dataclass(slots=True)
class _Bookmark:
    """How far a stream has been read."""

    body: dict[str, Any]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The idempotency key: a request that is sent again joins the first request."""
    stream_id: str = ""
    """Empty until the answer begins, and for servers whose streams cannot be resumed."""
    last_event_id: str = ""

    def request(self, client: httpx.Client) -> httpx.Request:
        """The request for the missing part of the answer."""
        if self.stream_id:
            path, headers = f"/v1/streams/{self.stream_id}", {"last-event-id": self.last_event_id}
            return client.build_request("GET", path, headers=headers)
        headers = {"accept": "text/event-stream", "idempotency-key": self.key}
        return client.build_request("POST", "/v1/chat/completions", json=self.body, headers=headers)


class ModelServer:
    """A server at a URL, with or without ``/v1`` at its end."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.on_lost: Callable[[], object] = lambda: None
        """Called whenever the connection to a stream is lost."""
        self._api_key = api_key
        self._patience_s = patience_s
        self.is_warren = False
        """Whether it is known to be a gateway, whose lists of models are complete."""
        self._client = connect(url, api_key, transport)
        self.url = str(self._client.base_url).rstrip("/")

    def close(self) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """The models that the server lists. Raises `PermissionDenied` if the API key may not list
        them, and `StartupError` if it cannot be asked."""
        try:
            response = self._client.get("/v1/models")
            self._check(response)
            listed: list[dict[str, str]] = response.json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise StartupError(unanswered(self.url, error, "server")) from error
        except (ValueError, KeyError, TypeError):
            raise StartupError(f"{self.url} is not an OpenAI-compatible server") from None
        except PermissionDenied:
            raise
        except (WarrenError, _Lost) as error:
            raise StartupError(str(error)) from error
        self.is_warren = any(model.get("owned_by") == "warren" for model in listed)
        if not self.is_warren:  # it may be silent until it has read a long prompt
            self._client.timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        return [model["id"] for model in listed]

    def stream(self, body: dict[str, Any]) -> Generator[_Chunk, None, None]:
        """Yield the chunks of a streamed chat completion; closing the generator cancels it.

        If the connection is lost, a Warren server is asked for the rest, until it answers or
        `PATIENCE_S` have passed. Raises the `WarrenError` that the server sent, or `InternalError`.
        """
        bookmark = _Bookmark(body)
        num_failures, lost_at = 0, 0.0
        try:
            while True:
                try:
                    for chunk in self._rest(bookmark):
                        num_failures = 0
                        yield chunk
                except (httpx.TransportError, _Lost) as error:
                    if not num_failures:
                        lost_at = time.monotonic()
                    waited_s = time.monotonic() - lost_at
                    if not self.is_warren or waited_s > self._patience_s:
                        raise InternalError(f"the connection was lost: {error}") from error
                else:
                    return
                if not num_failures:
                    self.on_lost()
                time.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
                num_failures += 1
        except (GeneratorExit, KeyboardInterrupt):
            self._cancel(bookmark.stream_id)
            raise

    def _rest(self, bookmark: "_Bookmark") -> Iterator[_Chunk]:
        """The chunks that are missing, as far as the connection lasts."""
        with closing(self._client.send(bookmark.request(self._client), stream=True)) as response:
            self._check(response)
            if "x-stream-token" in response.headers:
                self.is_warren = True  # also if no model was listed yet
                bookmark.stream_id = response.headers["x-request-id"]
            for event in _events(response):
                if event.data == "[DONE]":
                    return
                bookmark.last_event_id = event.id or bookmark.last_event_id
                yield _chunk(event)
        if response.status_code != httpx.codes.NO_CONTENT:
            raise _Lost("the stream ended before the answer was complete")

    def _cancel(self, stream_id: str) -> None:
        if stream_id:
            with suppress(httpx.HTTPError):
                self._client.delete(f"/v1/streams/{stream_id}", timeout=_CANCEL_TIMEOUT_S)

    def _check(self, response: httpx.Response) -> None:
        """Raise the error of a response: `_Lost` if another gateway may answer."""
        if not response.is_error:
            return
        response.read()
        unknown = InternalError(f"the server answered with status {response.status_code}")
        error = error_of(response) or unknown
        match response.status_code:
            case httpx.codes.UNAUTHORIZED:
                raise InvalidApiKey(key_problem(self.url, self._api_key))
            case httpx.codes.BAD_GATEWAY | httpx.codes.SERVICE_UNAVAILABLE:
                raise _Lost(error.message)
        raise error


class AnswerText(NamedTuple):
    """Text of an answer, or of the model's thoughts before it."""

    text: str
    is_thought: bool


class Conversation:
    """The messages exchanged so far with ``model``, and its settings."""

    def __init__(
        self,
        server: ModelServer,
        model: str,
        temperature: float,
        system: str = "",
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.system = system
        self.max_tokens = max_tokens
        self.messages: list[dict[str, str]] = []
        self.finish_reason: str | None = None
        """Why the last answer ended; None if it was interrupted."""
        self._server = server

    @property
    def prompt(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, question: str) -> Generator[AnswerText, None, None]:
        """Stream the answer piece by piece; closing the generator cancels the request.

        A truncated answer stays in the conversation; thoughts, and a question without any answer,
        do not. Raises what `ModelServer.stream` raises.
        """
        self.finish_reason = None
        self.messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.prompt,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        answer = ""
        try:
            with closing(self._server.stream(body)) as chunks:
                for chunk in chunks:
                    for choice in chunk.choices:
                        self.finish_reason = choice.finish_reason or self.finish_reason
                        if thought := choice.delta.reasoning_content:
                            yield AnswerText(thought, is_thought=True)
                        if text := choice.delta.content:
                            answer += text
                            yield AnswerText(text, is_thought=False)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()


def show_answer(conversation: Conversation, question: str, console: Console) -> None:
    """Print an answer while it is streamed. A terminal also shows the thoughts before it, and
    escapes instead of control characters; anything else gets the answer as it is.

    Raises what `Conversation.ask` raises.
    """
    is_thinking, is_empty, has_thought = False, True, False
    with closing(conversation.ask(question)) as pieces:
        for text, is_thought in pieces:
            is_empty = is_empty and is_thought
            has_thought = has_thought or is_thought
            if not console.is_terminal:
                if not is_thought:
                    console.file.write(text)  # `Console.print` would expand tabs
                    console.file.flush()
                continue
            if is_thinking and not is_thought:
                console.print("\n")
            is_thinking = is_thought
            console.print(
                escape_controls(text),
                style="dim" if is_thought else None,
                end="",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    console.print()
    if is_empty:
        reason = ""
        if conversation.finish_reason == "length":
            verb = "thinking" if has_thought else "writing"
            reason = f": the model was still {verb} at the limit of tokens"
        notices.print(f"The answer is empty{reason}. The question is forgotten.", style="dim")


def _events(response: httpx.Response) -> Iterator[_Event]:
    """The complete events of an SSE stream."""
    fields: dict[str, str] = {}
    for raw_line in lines_of(response):
        line = raw_line.removesuffix(b"\r").decode(errors="replace")
        name, colon, value = line.partition(":")
        if name and colon:
            fields[name] = value.removeprefix(" ")
        elif not line:
            if "data" in fields:
                yield _Event(fields.get("id", ""), fields["data"])
            fields = {}


def _chunk(event: _Event) -> _Chunk:
    """The chunk of an event. Raises its error: `_Lost` if the stream continues elsewhere."""
    try:
        chunk = msgspec.json.decode(event.data, type=_Chunk)
    except msgspec.MsgspecError as problem:
        raise InternalError(
            f"the server sent an event that is not a chat completion chunk: {problem}"
        ) from None
    if chunk.error:
        error = as_error(chunk.error)
        raise _Lost(error.message) if isinstance(error, Unavailable) else error
    return chunk
