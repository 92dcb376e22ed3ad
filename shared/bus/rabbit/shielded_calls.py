"""Calls to the broker, each in a task of its own that nothing cancels.

aiormq 7.2.4 does not survive every cancellation of a call. A cancelled declaration or consume
closes its channel, and leaks the channel number if it is cancelled twice; if the broker closes that
channel at the same moment, it then ends the whole connection. aiormq's timeouts are cancellations,
too. `asyncio.wait_for`, which aiormq uses, swallows a cancellation up to Python 3.11 if the answer
arrives at the same moment. Therefore a caller that is cancelled, or has waited for long enough,
returns at once, and its call completes in the background: with the broker's answer, or with the end
of its connection, which the heartbeat ends if the broker is silent. Only then are calls cancelled,
because aiormq may leave a call waiting on a connection that has ended.

Publishes and acknowledgements are no calls: see `shared.bus.rabbit.confirms` and `Outbox`.

A broker from 3.11 on does not answer calls that concern a classic queue whose node is down: it
looks for the queue for a minute. If it answers other calls meanwhile, that is the queue's state.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from shared.errors import BusError, BusUnavailable, QueueSilent, Unanswered
from shared.telemetry import incidents

_QUIET_S = 2.5
"""Seconds after which the broker is asked something else."""
_Result = TypeVar("_Result")


class Calls:
    """Runs the calls over a link."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s`` limits the time for which a caller waits."""
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        call: Coroutine[Any, Any, _Result],
        doing: str,
        *,
        undo: Callable[[_Result], Coroutine[Any, Any, object]] | None = None,
        probe: Callable[[], Coroutine[Any, Any, object]] | None = None,
    ) -> _Result:
        """Return the result of ``call``. ``doing`` describes the call in errors.

        Raises the `BusError` of the call, `BusUnavailable` if its connection was closed, and
        `Unanswered` after the timeout. An unknown exception is reported and raised as a `BusError`.
        If the caller is cancelled or does not wait any longer, ``undo`` is run with the result; a
        cancelled caller waits for that unless it is cancelled again.

        ``probe`` accompanies a call that concerns a queue: if the probe is answered although the
        call is not, `QueueSilent` is raised.
        """
        task = self._start(call)
        try:
            is_answered = await self._wait(task, probe)
        except asyncio.CancelledError:
            if undo is not None:
                await asyncio.wait([self._start(_undone(task, undo))])
            raise
        if task.done():
            return _result(task, doing)
        if undo is not None:
            self._start(_undone(task, undo))
        if is_answered:
            raise QueueSilent(f"{doing}: no answer, while the broker answers others")
        raise Unanswered(f"{doing}: no answer in time")

    async def _wait(
        self,
        task: asyncio.Task[Any],
        probe: Callable[[], Coroutine[Any, Any, object]] | None,
    ) -> bool:
        """Wait for a call, but not for too long; returns whether the broker has answered the probe
        instead."""
        if probe is None or self._timeout_s <= _QUIET_S:
            await asyncio.wait([task], timeout=self._timeout_s)
            return False
        await asyncio.wait([task], timeout=_QUIET_S)
        if task.done():
            return False
        probing = self._start(probe())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s - _QUIET_S):
                await asyncio.wait([task, probing], return_when=asyncio.FIRST_COMPLETED)
                if probing.done() and not probing.cancelled() and probing.exception() is None:
                    return True
                await asyncio.wait([task])
        return False

    def end(self) -> None:
        """End all calls, whose connection is closed."""
        for task in self._running:
            task.cancel()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Return when all calls have ended, or after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await asyncio.wait(self._running)

    def _start(self, call: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(call)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log the failure of an abandoned call


async def _undone(
    task: asyncio.Task[_Result], undo: Callable[[_Result], Coroutine[Any, Any, object]]
) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await undo(task.result())


def _result(task: asyncio.Task[_Result], doing: str) -> _Result:
    if task.cancelled():  # aiormq cancels calls that wait on a connection it closes
        raise BusUnavailable(f"{doing}: the connection was closed")
    error = task.exception()
    if error is not None and not isinstance(error, BusError):
        incidents.report("call", "call to the broker failed", error, call=doing)
        raise BusError(f"{doing}: {type(error).__name__}: {error}") from error
    return task.result()
