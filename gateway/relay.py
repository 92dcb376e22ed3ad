"""The gateway's end of a request's log: publishes the job, reads the log, obeys its rules.

How a relay ends decides what becomes of the job and its log:

* The log came to its end: the reply queue is deleted.
* It did not (the client left, the deadline passed, something failed): the worker that answers gets
  `Cancel`, then the reply queue is deleted. A job that no worker has started yet loses its reply
  queue alone: the worker that takes it finds its first event `Unroutable` and drops the job.
* Another gateway took over: the log and the job are the other's; nothing is touched.

If the broker is away at that moment, the queue goes by its expiry and the job by the worker's watch
over its reader.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from gateway.reply_queues import ReplyLog, ReplyQueues
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import (
    BusError,
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    PublishUnconfirmed,
    QueueBusy,
    QueueNotFound,
    TakenOver,
    Unroutable,
    WarrenError,
)
from shared.messages import GenerationJob, Started, decode_event, encode
from shared.stream import LogReader, Relay, Send

logger = logging.getLogger(__name__)

_REATTACH_PAUSE_S = 0.05


class JobRelay:
    """Relays the log of one job. Made by `Relays.open`."""

    def __init__(self, bus: Bus, job: GenerationJob, log: ReplyLog) -> None:
        self._bus = bus
        self._job = job
        self._log = log
        self._deadline = _loop_time(job.deadline)
        self._reader = LogReader(job.request_id, len(job.prompts))
        self._log_task: asyncio.Task[None] | None = None
        self._has_started = False
        self._ordinal = 0
        self._relays: list[Relay] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: WarrenError | None = None
        self._is_ended = False
        self._is_closing = False

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event has been taken."""
        return self._is_ended and not self._relays

    async def take(self, timeout_s: float | None = None) -> list[Relay]:
        """Wait for accepted events; returns all that are there, or none after ``timeout_s``.

        The first `Started` is among them, later ones are not. Raises `DeadlineExceeded`, and
        what ended the relay before the log's end.
        """
        if not self._relays and self._error is None:
            await self._wait(timeout_s)
        if not self._relays and self._error is not None:
            raise self._error
        relays, self._relays = self._relays, []
        return relays

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the events that are here already."""
        self._error = self._error or error
        self._wake()

    def let_go(self) -> None:
        """Stop reading, so that another gateway can, and end with `TakenOver`."""
        self.fail(TakenOver("The stream goes on elsewhere."))
        if self._log_task is not None:
            self._log_task.cancel()

    async def open(self) -> None:
        """Start to read the log, whose queue exists, and publish the job.

        Raises `ModelNotFound`, `Overloaded`, `InvalidRequest` and `BusError`.
        """
        self._log_task = asyncio.create_task(self._read_log())
        try:
            await self._publish()
        except Unroutable:
            raise ModelNotFound(
                f"The model '{self._job.model}' does not exist.", param="model"
            ) from None
        except PublishRefused:
            raise Overloaded("Too many requests wait for this model.") from None
        except MessageTooLarge:
            raise InvalidRequest("The request is too large.") from None

    async def close(self) -> None:
        """Leave the log as the module's docstring says."""
        self._is_closing = True
        try:
            if not isinstance(self._error, TakenOver):
                with suppress(BusError):
                    await self._end_job()
        finally:
            if self._log_task is not None:
                self._log_task.cancel()
                await asyncio.wait([self._log_task])
            await self._log.close()  # if that task had no time to begin

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        until = min(self._deadline, loop.time() + (timeout_s or float("inf")))
        # There is one wait for each token: `asyncio.timeout` would cost as much as its relay, and
        # an Event 1 KiB a stream.
        self._waiter = loop.create_future()
        alarm = loop.call_at(until, self._wake)
        try:
            await self._waiter
        finally:
            alarm.cancel()
        if loop.time() >= self._deadline and not self._is_ended:
            raise DeadlineExceeded("The request's deadline has passed.")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _publish(self) -> None:
        message = Message(
            encode(self._job),
            correlation_id=self._job.request_id,
            reply_to=self._log.queue.bindings[0].routing_key,
            expires_s=self._job.deadline and max(0.001, self._job.deadline - time.time()),
        )
        await self._bus.publish(topology.jobs_binding(self._job.model, "interactive"), message)

    async def _end_job(self) -> None:
        for send in self._reader.cancel():
            await self._send(send)
        await self._bus.delete_queue(self._log.queue.name)

    async def _read_log(self) -> None:
        """Read until cancelled, through lost connections."""
        try:
            while True:
                try:
                    await self._read_from_start()
                except QueueBusy:  # the broker has not noticed that the old connection is dead
                    await asyncio.sleep(_REATTACH_PAUSE_S)
                except (BusUnavailable, PublishUnconfirmed):
                    await self._bus.wait_connected()
                    await asyncio.sleep(_REATTACH_PAUSE_S)
        except QueueNotFound:
            # Also how a reader learns that `close` has deleted the queue under it.
            if not self._is_closing:
                self._fail_logged("log lost")
        except Exception:  # noqa: BLE001 - logged; one request's bug is one request's failure
            self._fail_logged("relay failed")

    def _fail_logged(self, what: str) -> None:
        logger.exception(what, extra={"request_id": self._job.request_id})
        self.fail(InternalError("The gateway lost the answer."))

    async def _read_from_start(self) -> None:
        """Attach and read. Nothing is acknowledged: the queue keeps the log."""
        consumer = await self._log.attach()
        try:
            self._reader = LogReader(self._job.request_id, len(self._job.prompts))
            async for delivery in consumer:
                message = delivery.message
                for action in self._reader.read(decode_event(message.body, message.content_type)):
                    if isinstance(action, Send):
                        await self._send(action)
                    else:
                        self._relay(action)
        finally:
            await self._log.close()

    def _relay(self, relay: Relay) -> None:
        """Pass on what was not passed on before the last reconnect."""
        if isinstance(relay.event, Started):
            is_new, self._has_started = not self._has_started, True
        else:
            is_new = relay.ordinal > self._ordinal
            self._ordinal = max(self._ordinal, relay.ordinal)
        if is_new:
            self._relays.append(relay)
            self._is_ended = self._reader.is_ended
            self._wake()

    async def _send(self, send: Send) -> None:
        # A worker that another one replaced may be gone, and its queue with it.
        with suppress(Unroutable):
            await self._bus.publish(
                topology.worker_binding(send.address), Message(encode(send.command))
            )


class Relays:
    """The relays in progress, by request id."""

    def __init__(self, bus: Bus, queues: ReplyQueues) -> None:
        self._bus = bus
        self._queues = queues
        self._relays: dict[str, JobRelay] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self, job: GenerationJob) -> AsyncIterator[JobRelay]:
        """Publish ``job`` and relay its log; see `JobRelay.open` for what this raises.

        The relay closes after this has returned: no answer waits for its queue to be deleted.
        """
        log = await self._queues.take(job.request_id)
        relay = self._relays[job.request_id] = JobRelay(self._bus, job, log)
        try:
            await relay.open()
            yield relay
        finally:
            del self._relays[job.request_id]
            closing = asyncio.create_task(relay.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def wait_closed(self) -> None:
        """Wait until all that has ended is cleaned up."""
        if self._closing:
            await asyncio.wait(self._closing)

    def release(self, request_id: str) -> None:
        """Let go of a request that another gateway takes over, if it is here."""
        relay = self._relays.get(request_id)
        if relay is not None:
            relay.let_go()

    def fail_all(self, error: WarrenError) -> None:
        for relay in self._relays.values():
            relay.fail(error)


def _loop_time(deadline: float | None) -> float:
    """A Unix time in the event loop's time."""
    if deadline is None:
        return float("inf")
    return asyncio.get_running_loop().time() + deadline - time.time()
