"""Errors that no code expects, raised at chosen awaits of a job, request or background task."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias

import pytest

from shared.bus.base import Binding, Consumer, Delivery, Exchange, Message, Queue, QueueState
from shared.bus.memory import MemoryBus


class Unforeseen(Exception):
    """An error without a handler."""


class Strike:
    """Raises at the ``at``-th await of its victim, and at every ``step``-th await after it if it
    has several errors to raise. Awaits of tasks that the victim starts count as its own."""

    def __init__(self, at: int, num_errors: int = 1, step: int = 1) -> None:
        self.raised: list[Unforeseen] = []
        self.replaced: list[BaseException] = []
        """Errors whose task was cancelled before it could handle them."""
        self._awaits = range(at, at + num_errors * step, step)
        self._num_awaits = 0
        self._is_over = False

    def end(self) -> None:
        """Raise nothing from now on."""
        self._is_over = True

    def next_error(self) -> Unforeseen | None:
        """The error for the next await, if any."""
        self._num_awaits += 1
        if self._is_over or self._num_awaits not in self._awaits:
            return None
        self.raised.append(Unforeseen(f"at await {self._num_awaits}"))
        return self.raised[-1]


Victim: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Strike | None]
_strike: contextvars.ContextVar[Strike | None] = contextvars.ContextVar("strike", default=None)


class _Stricken(Coroutine[Any, Any, Any]):
    """A coroutine into whose awaits errors can be raised."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], strike: Strike) -> None:
        self._coroutine = coroutine
        self._strike = strike
        self._is_started = False
        self.__qualname__ = name_of(coroutine)

    def send(self, value: Any) -> Any:
        is_resumed, self._is_started = self._is_started, True
        if is_resumed and (error := self._strike.next_error()) is not None:
            return self.throw(error)
        return self._resume(self._coroutine.send, value)

    def throw(
        self,
        kind: Any,
        error: Any = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        self._is_started = True
        return self._resume(self._coroutine.throw, kind if error is None else error)

    def _resume(self, resume: Callable[[Any], Any], value: Any) -> Any:
        try:
            return resume(value)
        except asyncio.CancelledError as cancelled:
            self._strike.replaced += _chain(cancelled)
            raise

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


@contextmanager
def striking(victim: Victim, *, with_children: bool = True) -> Iterator[None]:
    """Within this context, ``victim`` returns the `Strike` for each new task, if any."""

    def new_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        assert isinstance(coroutine, Coroutine)
        strike = _strike.get()
        if strike is None and (strike := victim(coroutine)) is not None and with_children:
            context = context or contextvars.copy_context()
            context.run(_strike.set, strike)
        if strike is not None:
            coroutine = _Stricken(coroutine, strike)
        return asyncio.Task(coroutine, loop=loop, context=context)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(new_task)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def name_of(coroutine: object) -> str:
    """The qualified name of its function."""
    return getattr(coroutine, "__qualname__", "")


def argument(coroutine: Coroutine[Any, Any, Any], function: str, name: str) -> Any:
    """The argument ``name`` of a coroutine that has not started; None if it is no coroutine of
    ``function``."""
    if name_of(coroutine) != function:
        return None
    return coroutine.cr_frame.f_locals[name]  # type: ignore[attr-defined]


def require_reported(caplog: pytest.LogCaptureFixture, strikes: Iterable[Strike]) -> None:
    """Check that each error is logged, alone or in the traceback of another error, that nothing
    else is logged as an error, and that each line was counted."""
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    told = [error for one in logged for error in _chain(one)]
    untold = [
        error
        for strike in strikes
        for error in strike.raised
        if not _is_in(error, told) and not _is_in(error, strike.replaced)
    ]
    assert not untold, f"not in the log: {untold}"
    foreign = [one for one in logged if not any(isinstance(e, Unforeseen) for e in _chain(one))]
    assert not foreign, f"in the log: {foreign}"
    assert len(logged) == len({id(error) for error in logged})
    assert len(logged) == sum(hasattr(record, "incident") for record in caplog.records)


def _is_in(error: BaseException, errors: Iterable[BaseException]) -> bool:
    return any(one is error for one in errors)


def require_each_await_struck(strikes: Iterable[Strike]) -> None:
    """Whether the last victim was spared, because it has fewer awaits."""
    *_, last = strikes
    assert not last.raised, "there are more awaits than victims"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The errors of a traceback."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from _chain(one)
        else:
            yield error
        error = error.__cause__ or error.__context__


class SuspendingBus(MemoryBus):
    """Suspends its caller before and after each effect, as a bus over a network does. An error that
    is raised at such a point leaves the effect undone or done."""

    num_consumers = 0

    async def wait_connected(self) -> None:
        async with _suspended():
            await super().wait_connected()

    async def declare(self, *resources: Exchange | Queue) -> None:
        async with _suspended():
            await super().declare(*resources)

    async def delete_queue(self, name: str) -> None:
        async with _suspended():
            await super().delete_queue(name)

    async def inspect(self, queue: str) -> QueueState | None:
        async with _suspended():
            return await super().inspect(queue)

    async def publish(self, binding: Binding, message: Message) -> None:
        async with _suspended():
            await super().publish(binding, message)

    @asynccontextmanager
    async def consume(  # type: ignore[override]
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[Consumer]:
        await asyncio.sleep(0)
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as consumer:
            self.num_consumers += 1
            try:
                await asyncio.sleep(0)
                yield _SuspendingConsumer(consumer)
                await asyncio.sleep(0)
            finally:
                self.num_consumers -= 1
        await asyncio.sleep(0)


class _SuspendingConsumer:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __aiter__(self) -> Self:
        return self

    def gather(self, interval_s: float) -> None:
        self._consumer.gather(interval_s)

    async def __anext__(self) -> Delivery:
        await asyncio.sleep(0)
        return _SuspendingDelivery(await self._consumer.__anext__())

    @property
    def is_open(self) -> bool:
        return self._consumer.is_open

    async def stop(self) -> None:
        async with _suspended():
            await self._consumer.stop()


class _SuspendingDelivery:
    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    @property
    def message(self) -> Message:
        return self._delivery.message

    @property
    def num_returns(self) -> int:
        return self._delivery.num_returns

    async def ack(self) -> None:
        async with _suspended():
            await self._delivery.ack()

    async def reject(self, *, requeue: bool = False) -> None:
        async with _suspended():
            await self._delivery.reject(requeue=requeue)


@asynccontextmanager
async def _suspended() -> AsyncIterator[None]:
    await asyncio.sleep(0)
    yield
    await asyncio.sleep(0)
