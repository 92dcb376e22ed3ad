"""Answers stored requests again, in the batch class."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from cli.gateway_client import request_json
from cli.replay.kinds import KINDS
from cli.replay.stored_requests import StoredRequest
from shared.errors import Overloaded, Unavailable, WarrenError

if TYPE_CHECKING:
    import httpx

Reply: TypeAlias = dict[str, Any] | WarrenError
"""The body of an answer, or the error in its place."""

_PATIENCE_S = 3600.0
"""How long an answer may take. Nothing comes on its connection before."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before a request is sent again that was refused for the moment, or got no answer."""
_LEFT_OUT = frozenset(
    {
        "background",
        "detach",
        "prompt_logprobs",
        "receipt",
        "return_tokens_as_token_ids",
        "stream",
        "stream_options",
        "timeout",
    }
)
"""The fields of a body that change how an answer is delivered, and not what it says."""


def is_repeatable(body: Mapping[str, Any]) -> bool:
    """Whether the same model answers a request alike every time: it is greedy or seeded."""
    return is_greedy(body) or body.get("seed") is not None


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Whether the likeliest token is always taken."""
    return body.get("temperature") == 0 or body.get("top_k") == 1


def asked(stored: StoredRequest, model: str, *, with_logprobs: bool) -> dict[str, Any]:
    """The body that asks a stored request of another model."""
    kept = {name: value for name, value in stored.body.items() if name not in _LEFT_OUT}
    scores = KINDS[stored.endpoint].logprobs if with_logprobs else {}
    terms = {"model": model, "service_tier": "flex", "on_limit": "wait", "store": False}
    return {**kept, **scores, **terms}


def send_all(
    client: "httpx.Client",
    bodies: Iterable[tuple[StoredRequest, dict[str, Any]]],
    *,
    num_parallel: int,
    on_answer: Callable[[StoredRequest, Reply], None],
) -> None:
    """Send each body to the endpoint of its request, ``num_parallel`` of them at a time, and call
    ``on_answer`` in this thread with each answer.

    The requests end with this process: nobody else would read the answers.
    """
    waiting: SimpleQueue[tuple[StoredRequest, dict[str, Any]]] = SimpleQueue()
    answers: SimpleQueue[tuple[StoredRequest, Reply | Exception]] = SimpleQueue()
    num_left = 0
    for one in bodies:
        waiting.put(one)
        num_left += 1

    def work() -> None:
        with suppress(Empty):
            while True:
                stored, body = waiting.get_nowait()
                try:
                    answers.put((stored, _answer(client, stored.endpoint, body)))
                except Exception as error:  # noqa: BLE001 (the main thread raises it)
                    answers.put((stored, error))

    for _ in range(min(num_parallel, num_left)):
        # Daemons do not keep the process from ending after Ctrl-C.
        threading.Thread(target=work, daemon=True).start()
    for _ in range(num_left):
        stored, outcome = answers.get()
        if not isinstance(outcome, dict | WarrenError):
            raise outcome
        on_answer(stored, outcome)


def _answer(client: "httpx.Client", endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """Raises `WarrenError`."""
    pauses = iter(_PAUSES_S)
    while True:
        try:
            answer = request_json(client, "POST", endpoint, json=body, timeout=_PATIENCE_S)
        except (Overloaded, Unavailable):
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)
        else:
            assert isinstance(answer, dict)
            return answer
