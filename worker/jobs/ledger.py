"""Records what each request has used, in the queue from which gateways fill their database."""

import asyncio
import logging
import time
from contextlib import suppress

from shared.bus.base import Bus, Message
from shared.errors import BusError, BusUnavailable, Unroutable
from shared.messages import UsageRecord, encode
from shared.telemetry import incidents
from shared.topology import LEDGER_RECORDS
from worker.jobs.metrics import JobMetrics

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.2
_PATIENCE_S = 30.0
"""Seconds for which a broker that is reachable may refuse a record or leave it unconfirmed. A job
is not settled meanwhile, and takes the place of others."""
_RECORDED_WITHIN_S = 5.0


async def recorded(recording: "asyncio.Task[None]") -> None:
    """Hold back the end of an answer until its record is confirmed, or for 5 s.

    A client that has read its answer to the end deletes the log, after which nobody could record
    what the request has used.
    """
    await asyncio.wait([recording], timeout=_RECORDED_WITHIN_S)


class Ledger:
    """Publishes usage records, each until it is confirmed."""

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
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                # A new message for each try: see `ReplyPublisher.publish`.
                message = Message(body, correlation_id=record.request_id)
                await self._bus.publish(LEDGER_RECORDS.bindings[0], message)
            except BusUnavailable:
                await asyncio.sleep(_RETRY_PAUSE_S)
                await self._bus.wait_connected()
                give_up_at = time.monotonic() + _PATIENCE_S
            except BusError as error:
                if self._is_losing or time.monotonic() > give_up_at:
                    facts = {"request_id": record.request_id, "tenant": record.tenant}
                    logger.error("usage record lost", extra={**facts, "reason": error.message})  # noqa: TRY400
                    return False
                await self._prepare_retry(error)
            else:
                return True

    async def _prepare_retry(self, error: BusError) -> None:
        if isinstance(error, Unroutable):  # the queue was deleted
            with suppress(BusError):
                return await self._bus.declare(LEDGER_RECORDS)
        return await asyncio.sleep(_RETRY_PAUSE_S)
