"""Quick jobs: jobs outside the generation queues, which are answered with a single message.

Embeddings of batches are quick jobs, too, without a class of their own. A gateway therefore asks
for a single embedding of each model at a time, once no other job of the model is without an answer:
see `QuickLane.spare_slot`.

All replies to a gateway arrive on one queue, which lives as long as its connection. After a lost
connection each pending job is published again; answering a job twice is harmless.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from gateway.fleet.publishing import JobPublisher
from shared import topology
from shared.bus.base import Bus, Delivery, Message
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    PublishUnconfirmed,
    UndecodableMessage,
    from_code,
)
from shared.messages import (
    Detokenized,
    Embedded,
    Failed,
    QuickJob,
    ReplyEvent,
    Tokenized,
    decode_event,
    seconds_left,
)
from shared.off_loop import off_loop

_PATIENCE_S = 60.0
"""The time for which a worker makes a batch job wait for interactive jobs by default."""
_RETRY_PAUSE_S = 1.0

_Answer = TypeVar("_Answer", Tokenized, Detokenized, Embedded)


class QuickLane:
    """Publishes quick jobs and receives their answers."""

    def __init__(
        self, bus: Bus, jobs: JobPublisher, *, retry_pause_s: float = _RETRY_PAUSE_S
    ) -> None:
        self._retry_pause_s = retry_pause_s
        self._bus = bus
        self._jobs = jobs
        self._queue = topology.quick_replies_queue(uuid.uuid4().hex)
        self._asked: dict[str, tuple[QuickJob, asyncio.Future[ReplyEvent]]] = {}
        self._is_listening = asyncio.Event()
        self._lost: asyncio.Future[None] | None = None
        """A future for the latest attachment to the queue; done once answers may have been lost."""
        self._spare_slots: dict[str, asyncio.Lock] = {}
        """The lock of each model's spare slot, by model."""

    async def ask(self, job: QuickJob, kind: type[_Answer]) -> _Answer:
        """Publish ``job`` and wait until its deadline for an answer of type ``kind``.

        Raises the worker's error, `DeadlineExceeded`, `ModelNotFound`, `Overloaded`,
        `InvalidRequest` and `BusError`.
        """
        answered: asyncio.Future[ReplyEvent] = asyncio.get_running_loop().create_future()
        self._asked[job.request_id] = job, answered
        try:
            async with asyncio.timeout(seconds_left(job)):
                answer = await self._answer(job, answered)
        except TimeoutError:
            raise DeadlineExceeded("No worker answered in time.") from None
        finally:
            del self._asked[job.request_id]
            answered.cancel()
        if isinstance(answer, Failed):
            raise from_code(answer.code, answer.message, answer.param)
        if not isinstance(answer, kind):
            raise InternalError("The worker's answer does not match this request.")
        return answer

    @asynccontextmanager
    async def spare_slot(self, model: str, patience_s: float = _PATIENCE_S) -> AsyncIterator[None]:
        """The only slot for jobs of ``model`` that no client waits for. It is free once no other
        job of the model is without an answer here, or after ``patience_s``."""
        slot = self._spare_slots.setdefault(model, asyncio.Lock())
        async with slot:
            await self._until_idle(model, patience_s)
            yield

    async def _until_idle(self, model: str, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            asked = [
                answered
                for job, answered in self._asked.values()
                if job.model == model and not answered.done()
            ]
            left_s = deadline - time.monotonic()
            if not asked or left_s <= 0:
                return
            await asyncio.wait(asked, timeout=left_s)

    async def listen(self) -> None:
        """Receive answers until cancelled, across reconnects."""
        resources = (topology.JOBS, self._queue)
        async with Subscription(self._bus, self._queue.name, declare=resources) as replies:
            try:
                async for item in replies:
                    await self._hear(item)
            finally:
                self._stop_listening()

    async def _hear(self, item: Delivery | Attached | Lost) -> None:
        match item:
            case Attached():
                self._lost = asyncio.get_running_loop().create_future()
                self._is_listening.set()
            case Lost():
                self._stop_listening()
            case _:
                await item.ack()
                await self._take(item.message)

    def _stop_listening(self) -> None:
        self._is_listening.clear()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    async def _answer(self, job: QuickJob, answered: "asyncio.Future[ReplyEvent]") -> ReplyEvent:
        """Publish ``job``, and again whenever its answer may be lost, until it is answered. Raises
        as `ask`, but no `BusUnavailable` and `PublishUnconfirmed` once it was published."""
        is_published = False
        while not answered.done():
            await self._is_listening.wait()
            assert self._lost is not None
            ends: list[asyncio.Future[Any]] = [answered, self._lost]
            patience_s = None
            try:
                await self._jobs.publish(job, self._queue.bindings[0].routing_key)
                is_published = True
            except (BusUnavailable, PublishUnconfirmed):
                if not is_published:
                    raise
                patience_s = self._retry_pause_s
            await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        return answered.result()

    async def _take(self, message: Message) -> None:
        _, answered = self._asked.get(message.correlation_id, (None, None))
        if answered is None or answered.done():  # its client has left, or it was answered before
            return
        try:
            decode = partial(decode_event, message.body, message.content_type)
            event = await off_loop(decode, len(message.body))
        except UndecodableMessage as error:
            reason = f"The answer could not be decoded: {error.message}"
            if not answered.done():
                answered.set_exception(InternalError(reason))
            return
        if not answered.done():  # its client may have left meanwhile
            answered.set_result(event)
