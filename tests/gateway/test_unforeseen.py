"""Unexpected errors in a gateway: each ends at most one request, or one iteration of a task."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from shared.bus.memory import MemoryBroker
from shared.telemetry import floods, incidents
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    events,
    eventually,
    hears_a_worker,
    live_gateway,
    text_of,
)
from tests.support.workers.faults import (
    Strike,
    SuspendingBus,
    argument,
    name_of,
    require_each_await_struck,
    require_reported,
    striking,
)
from tests.support.workers.scripted_worker import ScriptedWorker

NUM_AWAITS = 60
"""More awaits than any request here has: the last victims are spared."""
VICTIM = "x-victim"
NUM_LISTENERS = 5
"""Consumers of announcements, commands, the use of keys, usage records, and answers to quick
jobs."""
NUM_SPARE = 8
"""Spare logs."""
WORDS = "one two three"
REFUSED = "refused"
CUT_OFF = "cut off"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "_MIN_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(floods, "MAX_LINES", 1000)  # all errors of a test come within a window


@pytest.fixture(autouse=True)
def _suspending_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """``send`` suspends, as it does for a client that reads slowly."""
    send = RequestResponseCycle.send

    async def suspended_send(cycle: RequestResponseCycle, message: ASGISendEvent) -> None:
        await asyncio.sleep(0)
        await send(cycle, message)
        await asyncio.sleep(0)

    monkeypatch.setattr(RequestResponseCycle, "send", suspended_send)


def by_request(strikes: list[Strike]) -> Callable[[Coroutine[Any, Any, Any]], Strike | None]:
    """The request's header selects the strike."""

    def victim(coroutine: Coroutine[Any, Any, Any]) -> Strike | None:
        cycle = argument(coroutine, "RequestResponseCycle.run_asgi", "self")
        named = dict(cycle.scope["headers"]).get(VICTIM.encode()) if cycle else None
        return None if named is None else strikes[int(named)]

    return victim


async def chat(gateway: LiveGateway, headers: dict[str, str], **more: Any) -> str:
    """The text of the answer, or the error."""
    try:
        response = await gateway.http.post(
            "/v1/chat/completions", json=chat_body(**more), headers=headers
        )
    except httpx.RemoteProtocolError:
        return CUT_OFF
    if response.status_code == 500:
        return refusal(response)
    assert response.status_code == 200
    if not more.get("stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    *_, last = events(response.text)
    if last != "[DONE]":
        assert last["error"]["code"] == "internal_error"
        return REFUSED
    return text_of(response.text)


async def tokens(gateway: LiveGateway, headers: dict[str, str]) -> str:
    try:
        response = await gateway.http.post(
            "/tokenize", json={"model": "scripted", "prompt": WORDS}, headers=headers
        )
    except httpx.RemoteProtocolError:
        return CUT_OFF
    if response.status_code == 500:
        return refusal(response)
    assert response.json()["tokens"] == [3, 3, 5]
    return WORDS


def refusal(response: httpx.Response) -> str:
    if response.text == "Internal Server Error":  # by the server: the gateway did not send it
        return CUT_OFF
    assert response.json()["error"]["code"] == "internal_error"
    return REFUSED


@pytest.mark.parametrize("num_errors", [1, 2])
@pytest.mark.parametrize("kind", ["stream", "whole", "keyed", "quick"])
async def test_errors_at_any_await_of_a_request_stay_in_it(
    kind: str,
    num_errors: int,
    broker: MemoryBroker,
    worker: ScriptedWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(gateway: LiveGateway, headers: dict[str, str]) -> str:
        if kind == "quick":
            return await tokens(gateway, headers)
        return await chat(gateway, headers, stream=kind != "whole")

    strikes = [Strike(at, num_errors) for at in range(1, NUM_AWAITS + 1)]
    async with SuspendingBus(broker) as bus, live_gateway(bus) as gateway:
        await hears_a_worker(gateway)
        with striking(by_request(strikes)):
            answers = await asyncio.gather(
                *(ask(gateway, headers(kind, at)) for at in range(NUM_AWAITS)),
                *(ask(gateway, {}) for _ in range(8)),
            )
            await eventually(lambda: holds_nothing(gateway, worker))
        after = await ask(gateway, {})
        await eventually(lambda: consumes(bus, 0 if kind == "quick" else NUM_SPARE))

    assert after == WORDS
    assert set(answers[NUM_AWAITS:]) == {WORDS}
    assert set(answers) <= {WORDS, REFUSED, CUT_OFF}
    require_each_await_struck(strikes)
    require_reported(caplog, strikes)


def headers(kind: str, victim: int) -> dict[str, str]:
    key = {"idempotency-key": f"key-{victim}"} if kind == "keyed" else {}
    return {VICTIM: str(victim), **key}


async def holds_nothing(gateway: LiveGateway, worker: ScriptedWorker) -> bool:
    """No admission and no task of a request remains, and the worker is idle."""
    health = (await gateway.http.get("/health")).json()
    names = {name_of(task.get_coro()) for task in asyncio.all_tasks()}
    return not (
        health["requests"]
        or worker.num_running
        or names & {"LogRelay._read", "_survived", "_wait_disconnect", "LogReading.catch_up"}
    )


async def consumes(bus: SuspendingBus, num_logs: int) -> bool:
    """Only this many logs remain, and the gateway's own subscriptions."""
    return bus.num_consumers == num_logs + NUM_LISTENERS


@pytest.mark.parametrize("at", range(1, 11))
async def test_an_error_at_any_await_of_a_background_task_leaves_it_running(
    at: int, broker: MemoryBroker, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """All tasks of the gateway are struck at once."""
    strikes: list[Strike] = []

    def victim(coroutine: Coroutine[Any, Any, Any]) -> Strike | None:
        if name_of(coroutine) not in ("keep_running", "_listen"):
            return None
        strikes.append(Strike(at))
        return strikes[-1]

    with striking(victim, with_children=False):
        async with SuspendingBus(broker) as bus, live_gateway(bus) as gateway:
            await hears_a_worker(gateway)
            answers = [await chat(gateway, {}, stream=is_stream) for is_stream in (True, False)]
            answers += await asyncio.gather(*(tokens(gateway, {}) for _ in range(8)))
            await eventually(lambda: holds_nothing(gateway, worker))
            answers.append(await chat(gateway, {}))
            await eventually(lambda: consumes(bus, NUM_SPARE))
            for strike in strikes:  # a gateway that is shutting down continues to do so
                strike.end()

    assert set(answers) == {WORDS}
    require_reported(caplog, strikes)
