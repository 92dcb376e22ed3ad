"""A conversation in the terminal with an OpenAI-compatible server."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import httpx
from rich.console import Console

from shared.errors import InternalError, StartupError, WarrenError, from_code

FAREWELL = "/exit"
_CONNECT_TIMEOUT_S = 5.0


class Conversation:
    """The messages exchanged so far with ``model``, which is reached through ``client``."""

    def __init__(self, client: httpx.Client, model: str, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.messages: list[dict[str, str]] = []
        self._client = client

    def ask(self, question: str) -> Generator[str, None, None]:
        """Stream the answer piece by piece; closing the generator cancels the request.

        A truncated answer stays in the conversation; a question without any answer does not. Raises
        the `WarrenError` that the server sent, or `InternalError`.
        """
        self.messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        except httpx.HTTPError as error:
            raise InternalError(f"the connection broke: {error}") from error
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
        }
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response)
            for event in _events(response):
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def connect(url: str, api_key: str | None = None) -> httpx.Client:
    """Create a client for the server at ``url``, without a timeout for answers."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url, headers=headers, timeout=timeout)


def first_model(client: httpx.Client) -> str:
    """The first model that the server lists. Raises `StartupError` if there is none."""
    try:
        response = client.get("/v1/models")
        _check(response)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"no server answers at {client.base_url}: {error}") from error
    models: list[dict[str, str]] = response.json()["data"]
    if not models:
        raise StartupError(f"the server at {client.base_url} serves no model yet")
    return models[0]["id"]


def converse(conversation: Conversation, console: Console) -> None:
    """Ask what the user types until they type /exit or press Ctrl-D or Ctrl-C."""
    console.print(
        f"[bold]{conversation.model}[/] is ready. Type {FAREWELL} to leave, press Ctrl-C to stop "
        "an answer.\n"
    )
    while (question := _read(console)) != FAREWELL:
        if question:
            _answer(conversation, question, console)


def show_answer(conversation: Conversation, question: str, console: Console) -> None:
    """Print an answer while it is streamed. Raises what `Conversation.ask` raises."""
    with closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()


def _read(console: Console) -> str:
    try:
        return console.input("[bold cyan]you[/]  ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return FAREWELL


def _answer(conversation: Conversation, question: str, console: Console) -> None:
    console.print(f"[bold green]{conversation.model}[/]  ", end="")
    try:
        show_answer(conversation, question, console)
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/]")
    except WarrenError as error:
        console.print(f"\n[red]{error.code}:[/] ", end="")
        console.print(error.message, markup=False, highlight=False)
    console.print()


def _check(response: httpx.Response) -> None:
    if response.is_error:
        response.read()
        try:
            error = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            raise InternalError(f"the server answered with status {response.status_code}") from None
        raise _error(error)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of an SSE stream. Raises `InternalError` if it ends without ``[DONE]``."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data != line:
            event: dict[str, Any] = json.loads(data)
            if event.get("error"):
                raise _error(event["error"])
            yield event
    raise InternalError("the stream ended before the answer was complete")


def _error(error: dict[str, Any]) -> WarrenError:
    return from_code(error.get("code") or "", error["message"], error.get("param"))
