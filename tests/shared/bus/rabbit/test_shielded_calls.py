"""Calls to the broker and the cancellation of their callers."""

import asyncio
from functools import partial

import pytest

from shared.bus.rabbit import shielded_calls
from shared.bus.rabbit.shielded_calls import Calls
from shared.errors import BusError, BusUnavailable, QueueNotFound, QueueSilent, Unanswered
from shared.telemetry import incidents

TIMEOUT_S = 5.0


async def test_a_cancelled_caller_leaves_at_once_and_its_call_ends_by_itself() -> None:
    calls, may_end, ended = Calls(TIMEOUT_S), asyncio.Event(), asyncio.Event()

    async def call() -> None:
        await may_end.wait()
        ended.set()

    caller = asyncio.create_task(calls.run(call(), "call"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await calls.wait_idle()

    assert ended.is_set()


async def test_what_an_abandoned_call_made_is_undone_before_the_caller_leaves() -> None:
    calls, undone = Calls(TIMEOUT_S), []

    async def call() -> str:
        await asyncio.sleep(0.01)
        return "consumer"

    async def undo(made: str) -> None:
        await asyncio.sleep(0)
        undone.append(made)

    caller = asyncio.create_task(calls.run(call(), "call", undo=undo))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert undone == ["consumer"]


async def test_a_call_whose_connection_is_closed_is_unavailable() -> None:
    async def call() -> None:
        raise asyncio.CancelledError

    with pytest.raises(BusUnavailable, match="declare: the connection was closed"):
        await Calls(TIMEOUT_S).run(call(), "declare")


async def test_an_error_of_the_bus_is_raised_as_it_is() -> None:
    async def call() -> None:
        raise QueueNotFound("gone")

    with pytest.raises(QueueNotFound, match="gone"):
        await Calls(TIMEOUT_S).run(call(), "consume")


async def test_an_unknown_exception_is_an_error_of_the_bus_and_reported() -> None:
    num_before = incidents.num_reported("call")

    async def call() -> None:
        raise asyncio.InvalidStateError("of a library")

    with pytest.raises(BusError, match="publish: InvalidStateError: of a library"):
        await Calls(TIMEOUT_S).run(call(), "publish")

    assert incidents.num_reported("call") == num_before + 1


async def test_a_call_that_takes_too_long_goes_on_after_its_caller() -> None:
    calls, may_end, ended = Calls(0.001), asyncio.Event(), asyncio.Event()

    async def call() -> None:
        await may_end.wait()
        ended.set()

    with pytest.raises(Unanswered, match="declare: no answer in time"):
        await calls.run(call(), "declare")
    may_end.set()
    await calls.wait_idle()

    assert ended.is_set()


async def test_what_a_call_made_too_late_is_undone() -> None:
    calls, undone, may_end = Calls(0.001), [], asyncio.Event()

    async def call() -> str:
        await may_end.wait()
        return "consumer"

    async def undo(made: str) -> None:
        undone.append(made)

    with pytest.raises(Unanswered):
        await calls.run(call(), "consume", undo=undo)
    may_end.set()
    await calls.wait_idle()

    assert undone == ["consumer"]


async def test_a_call_is_about_a_queue_that_is_down_if_only_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shielded_calls, "_QUIET_S", 0.01)
    calls, undone, may_end = Calls(TIMEOUT_S), [], asyncio.Event()

    async def call() -> str:
        await may_end.wait()
        return "consumer"

    async def undo(made: str) -> None:
        undone.append(made)

    with pytest.raises(QueueSilent, match="consume: no answer, while the broker answers others"):
        await calls.run(call(), "consume", undo=undo, probe=partial(asyncio.sleep, 0))
    may_end.set()
    await calls.wait_idle()

    assert undone == ["consumer"]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_broker_that_answers_nothing_is_no_queue_that_is_down(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shielded_calls, "_QUIET_S", 0.01)
    calls = Calls(0.05)

    async def probe() -> None:
        if is_refused:
            raise BusUnavailable("the connection was lost")
        await asyncio.sleep(60)

    with pytest.raises(Unanswered):
        await calls.run(asyncio.sleep(60), "consume", probe=probe)
    calls.end()
    await calls.wait_idle()


async def test_an_answer_counts_however_late_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shielded_calls, "_QUIET_S", 0.01)

    async def call() -> str:
        await asyncio.sleep(0.05)
        return "state"

    inspected = Calls(TIMEOUT_S).run(call(), "inspect", probe=partial(asyncio.sleep, 0.2))

    assert await inspected == "state"
