"""Publishes the messages of a job until the broker has confirmed them: the events of its log, the
record of its usage, and the messages that replace its delivery. Settles the delivery."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import msgspec

from shared import topology
from shared.bus import retry
from shared.bus.base import DEATH_REASON_HEADER, Binding, Bus, Delivery, Message
from shared.bus.subscribe import Subscription
from shared.bus.upkeep import report_unbound
from shared.errors import (
    BusError,
    BusUnavailable,
    InvalidRequest,
    PublishRefused,
    PublishUnconfirmed,
    QueueDown,
    UndecodableMessage,
    Unroutable,
    WarrenError,
)
from shared.messages import (
    JSON,
    Ended,
    Failed,
    GenerationJob,
    QuickJob,
    ReplyEvent,
    UsageRecord,
    encode,
    unknown_fields,
)
from shared.telemetry import incidents
from worker.jobs.metrics import JobMetrics

logger = logging.getLogger(__name__)

IGNORED_FIELDS_HEADER = "warren-ignored-fields"
"""Names the unknown fields of a job, in the job's answers and in the messages that replace it."""
_RETURNS_HEADER = "warren-returns"
"""How often the messages were returned that a message replaces, for a job without a log."""
_BROKER_PREFIX = "x-"
"""The prefix of headers that the broker has added, for example to a dead letter."""
_GIVE_BACK_PAUSE_S = 0.5
"""Seconds. A job that is given back each time exhausts its returns within 10 s, without noticeable
effect on other jobs."""
_RETRY_PAUSE_S = 0.2
_MAX_REFUSED = 10
"""A broker refuses single messages while it recovers. A queue of limited length, which a publisher
may have declared for its replies, refuses until it is read."""
_REFUSAL_S = 2.0
"""Seconds at most to tell a publisher that its job cannot be read."""
_DOWN_PATIENCE_S = 30.0
"""Seconds for which an event waits for the node of its log, or for a reader that begins the log
again."""
_RECORD_PATIENCE_S = 30.0
"""Seconds for which a broker that is reachable may refuse a record or leave it unconfirmed. A job
is not settled meanwhile, and takes the place of others."""
_RECORDED_WITHIN_S = 5.0


class _Log(Enum):
    """The state of a log whose broker refuses an event."""

    THERE = auto()
    GONE = auto()
    """It does not exist, or not for this worker."""
    DOWN = auto()
    """Its node is down."""
    UNKNOWN = auto()


@dataclass
class _Tries:
    """The attempts to publish an event."""

    num_refused: int = 0
    """Refusals while the log's node is up."""
    down_since: float = math.inf


class LogMoved(Exception):
    """The log's reader has begun it again in another queue, after its node had died; events are
    published there from now on. It is unknown which of the earlier events its reader has read."""


class JobDelivery:
    """A `Delivery` that can be settled without raising.

    After an unexpected error it is settled again. If that has no effect either, its subscription
    stops and another subscription replaces it. The stopped subscription closes when its jobs have
    ended, and the broker then gets its unsettled deliveries back.
    """

    def __init__(
        self, delivery: Delivery, subscription: Subscription, *, is_trusted: bool = False
    ) -> None:
        """``is_trusted``: it comes from a worker or a gateway, whose count of returns counts."""
        self.message = delivery.message
        self.num_returns = delivery.num_returns
        """How often the job was returned to its queue, hand-overs excepted if it has no log."""
        if is_trusted:
            self.num_returns += num_returns_before(delivery.message)
        self._is_trusted = is_trusted
        self._delivery = delivery
        self._subscription = subscription

    @property
    def is_new(self) -> bool:
        """Whether a publisher has just sent the job, rather than a gateway, which has admitted it,
        or a worker that had it before."""
        return not self._is_trusted and not self.num_returns

    @property
    def may_have_been_admitted(self) -> bool:
        """Whether gateways may count the job, because a worker has received it before from its
        publisher."""
        return not self._is_trusted and self.num_returns > 0

    def note_ignored_fields(self, job: GenerationJob | QuickJob) -> str:
        """Find the fields of the message that ``job``, which was decoded from it, does not have;
        from now on the message has `IGNORED_FIELDS_HEADER`. Returns their names.

        Messages between Warren's own processes, which are MessagePack, are not searched: a newer
        version may have written them.
        """
        message = self.message
        is_json = message.content_type == JSON
        if self._is_trusted and not is_json:
            return ""
        found = ", ".join(unknown_fields(type(job), message.body, is_json=is_json))
        headers = dict(message.headers)
        if not self._is_trusted:
            headers.pop(IGNORED_FIELDS_HEADER, None)
        if found:
            headers[IGNORED_FIELDS_HEADER] = found
        self.message = msgspec.structs.replace(message, headers=headers)
        return found

    def is_of(self, subscription: Subscription) -> bool:
        return self._subscription is subscription

    async def ack(self) -> None:
        await self._settle(self._delivery.ack)

    async def reject(self, *, requeue: bool = False) -> None:
        await self._settle(partial(self._delivery.reject, requeue=requeue))

    async def give_back(self) -> None:
        """Requeue the job after a pause."""
        await self._settle(self._return_later)

    async def _return_later(self) -> None:
        await asyncio.sleep(_GIVE_BACK_PAUSE_S)
        await self._delivery.reject(requeue=True)

    async def _settle(self, settle: Callable[[], Awaitable[None]]) -> None:
        facts = {"request_id": self.message.correlation_id}
        try:
            await settle()
        except Exception as error:  # noqa: BLE001 (any error is reported)
            incidents.report("job", "delivery settled again", error, **facts)
            with incidents.survived("job", "delivery not settled", **facts):
                await settle()
            await incidents.keep_running(self._subscription.stop, "job consumer not stopped")


class ReplyPublisher:
    """Publishes the events of a request to its reply queue."""

    def __init__(self, bus: Bus, delivery: Delivery, request_id: str) -> None:
        self._bus = bus
        self._binding: Binding = topology.reply_binding(delivery.message.reply_to)
        self._content_type = delivery.message.content_type
        self._correlation_id = delivery.message.correlation_id or request_id
        ignored = delivery.message.headers.get(IGNORED_FIELDS_HEADER)
        self._headers = {} if ignored is None else {IGNORED_FIELDS_HEADER: ignored}
        self._has_moved = False

    @property
    def queue(self) -> str:
        """The name of the reply queue, if the gateway named it after its routing key."""
        return self._binding.routing_key

    @property
    def is_renewed(self) -> bool:
        """Whether the log was recreated."""
        return self.queue != topology.first_log(self.queue)

    async def find_log(self) -> bool:
        """Whether the log was recreated, or was before and `publish` has not reported it yet.

        Raises `BusUnavailable`.
        """
        later = await topology.find_later_log(self._bus, self.queue)
        if later is not None:
            self._binding = topology.reply_binding(later)
            self._has_moved = True
        return self._has_moved

    async def publish(self, event: ReplyEvent) -> None:
        """Return once the broker has confirmed the event; without a confirmation it is sent again.

        Raises `LogMoved`, `Unroutable` if the log does not exist, and `QueueDown` if its node is
        down, or it has no binding, for long. After any error but a `BusError` the event may have
        arrived.
        """
        body = encode(event, self._content_type)
        tries = _Tries()
        while True:
            if self._has_moved:
                self._has_moved = False
                raise LogMoved
            # A new message for each try, because returned messages are matched by message id.
            message = Message(
                body,
                content_type=self._content_type,
                correlation_id=self._correlation_id,
                headers=self._headers,
            )
            try:
                return await self._bus.publish(self._binding, message)
            except (PublishRefused, Unroutable) as error:
                await self._wait_or_raise(error, tries)
            except (BusUnavailable, PublishUnconfirmed):
                pass
            await retry.pause(self._bus, _RETRY_PAUSE_S)

    async def _wait_or_raise(self, error: PublishRefused | Unroutable, tries: _Tries) -> None:
        """Return if the event is to be sent again; raises ``error``, or `QueueDown`, otherwise."""
        state = await self._look()
        is_unbound = state is _Log.THERE and isinstance(error, Unroutable)
        # A gateway's log that returns with its node is there before its binding is. A queue that
        # another publisher has not bound stays so.
        is_gateways = topology.later_log(self.queue) is not None
        if state is _Log.DOWN or (is_unbound and is_gateways):
            tries.num_refused = 0
            tries.down_since = min(tries.down_since, time.monotonic())
            if time.monotonic() - tries.down_since >= _DOWN_PATIENCE_S:
                raise QueueDown(f"the node of the log {self.queue} is down") from error
        elif state is _Log.GONE and isinstance(error, Unroutable):
            if not await self._has_moved_on():
                raise error
        elif state is not _Log.UNKNOWN:
            tries.num_refused += 1
            tries.down_since = math.inf
            if tries.num_refused > _MAX_REFUSED:
                raise error

    async def _has_moved_on(self) -> bool:
        """Whether a log that is gone was recreated, or may have been. The first log of a stream
        returns with its node, and expires there without a reader."""
        try:
            return await self.find_log()
        except BusUnavailable:
            return True

    async def _look(self) -> _Log:
        """The state of the log. If its node is down, looks for a recreated log."""
        try:
            state = await self._bus.inspect(self.queue)
        except QueueDown:
            with suppress(BusUnavailable):
                await self.find_log()
            return _Log.DOWN
        except BusUnavailable:
            return _Log.UNKNOWN
        except BusError:  # it is exclusive to its reader, or not to be seen
            return _Log.GONE
        return _Log.GONE if state is None else _Log.THERE


async def recorded(recording: "asyncio.Task[None]") -> None:
    """Hold back the end of an answer until its record is confirmed, or for 5 s.

    A client that has read its answer to the end deletes the log, after which no other worker could
    record the usage of the request.
    """
    await asyncio.wait([recording], timeout=_RECORDED_WITHIN_S)


class Ledger:
    """Publishes what each request has used, in the queue from which gateways fill their database. A
    record is sent again until it is confirmed."""

    def __init__(self, bus: Bus, metrics: JobMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._recording: set[asyncio.Task[None]] = set()
        self._is_losing = False
        """Whether the last record was given up; others then get a single try, or all jobs would
        wait."""

    def record(self, record: UsageRecord) -> "asyncio.Task[None]":
        """Begin to publish a record. The task ends once it is confirmed, or given up and reported;
        it raises nothing."""
        task = asyncio.create_task(self._record(record))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        return task

    async def wait(self, timeout_s: float) -> None:
        """Wait for the records under way. No other process publishes them."""
        if self._recording:
            await asyncio.wait(self._recording, timeout=timeout_s)

    async def _record(self, record: UsageRecord) -> None:
        is_confirmed = False
        try:
            is_confirmed = await self._publish(record)
        except Exception as error:  # noqa: BLE001 (the job is settled all the same)
            facts = {"request_id": record.request_id}
            incidents.report("job", "usage not recorded", error, **facts)
        self._is_losing = not is_confirmed
        result = "confirmed" if is_confirmed else "lost"
        self._metrics.usage_records.labels(self._metrics.model, result).inc()

    async def _publish(self, record: UsageRecord) -> bool:
        """Publish a record until it is confirmed; False if it was given up."""
        body = encode(record)
        give_up_at = time.monotonic() + _RECORD_PATIENCE_S
        while True:
            try:
                # A new message for each try: see `ReplyPublisher.publish`.
                message = Message(body, correlation_id=record.request_id)
                await self._bus.publish(topology.LEDGER_RECORDS.bindings[0], message)
            except BusUnavailable:
                await retry.pause(self._bus, _RETRY_PAUSE_S)
                give_up_at = time.monotonic() + _RECORD_PATIENCE_S
            except BusError as error:
                if self._is_losing or time.monotonic() > give_up_at:
                    facts = {"request_id": record.request_id, "tenant": record.tenant}
                    logger.error("usage record lost", extra={**facts, "reason": error.message})  # noqa: TRY400
                    return False
                await self._prepare_retry(error)
            else:
                return True

    async def _prepare_retry(self, error: BusError) -> None:
        if isinstance(error, Unroutable):  # the queue was deleted, or its binding
            binding = topology.LEDGER_RECORDS.bindings[0]
            report_unbound(binding.exchange.name, binding.routing_key)
            with suppress(BusError):
                return await self._bus.declare(topology.LEDGER_RECORDS)
        return await asyncio.sleep(_RETRY_PAUSE_S)


def as_message(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as a new message in place of ``message``, whose returns are counted from
    ``num_returns``."""
    headers = {
        name: value
        for name, value in message.headers.items()
        if name != _RETURNS_HEADER and not name.startswith(_BROKER_PREFIX)
    }
    if num_returns:
        headers[_RETURNS_HEADER] = num_returns
    return Message(
        encode(job, message.content_type),
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        headers=headers,
    )


def in_order(job: GenerationJob, message: Message) -> GenerationJob:
    """The job of ``message``, whose runs compare as newer than all before.

    A job for workers with other numerics, or for a conversation's affinity target, expires if no
    such worker takes it, which brings it here. The broker counts its returns from 0 again, so it is
    the next publication of its request.
    """
    return _next_publication(job) if DEATH_REASON_HEADER in message.headers else job


def published_again(job: GenerationJob, message: Message, num_returns: int = 0) -> Message:
    """The job as the next publication of its request."""
    return as_message(_next_publication(job), message, num_returns)


def _next_publication(job: GenerationJob) -> GenerationJob:
    return msgspec.structs.replace(job, publication=job.publication + 1)


def num_returns_before(message: Message) -> int:
    """How often the messages were returned that a worker's message replaces."""
    num = message.headers.get(_RETURNS_HEADER, 0)
    return max(0, num) if isinstance(num, int) else 0


async def tell_end(bus: Bus, request_id: str, num_tokens: int) -> None:
    """Tell the gateways that a job counts against its API key or its tenant no longer. If they miss
    it, the job counts until its deadline."""
    ended = Ended(request_id=request_id, num_tokens=num_tokens)
    with suppress(BusError):
        await bus.publish(topology.USAGE, Message(encode(ended)))


async def turn_away(bus: Bus, delivery: JobDelivery, error: WarrenError) -> None:
    """Answer a job that is not run with an error, and acknowledge it. A reply queue that is not
    there gets nothing."""
    publisher = ReplyPublisher(bus, delivery, delivery.message.correlation_id)
    with suppress(BusError, LogMoved, TimeoutError):
        async with asyncio.timeout(_REFUSAL_S):
            failed = Failed(code=error.code, message=error.message, param=error.param)
            await publisher.publish(failed)
    await delivery.ack()


async def refuse(
    bus: Bus, delivery: JobDelivery, error: UndecodableMessage, publishers: topology.Publishers
) -> None:
    """Dead-letter a job that cannot be read. Its publisher receives the error if the reply queue is
    its own, and is there."""
    message = delivery.message
    if publishers.may_be_answered(message):
        publisher = ReplyPublisher(bus, delivery, message.correlation_id)
        failed = Failed(code=InvalidRequest.code, message=error.message)
        with suppress(BusError, LogMoved, TimeoutError):
            async with asyncio.timeout(_REFUSAL_S):
                await publisher.publish(failed)
    await delivery.reject()
