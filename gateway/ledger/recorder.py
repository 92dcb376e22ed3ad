"""Writes the usage records of workers to the database."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prometheus_client import Counter

from gateway.store.database import refuses_values
from gateway.store.state import Store, StoredState
from shared.bus.base import Bus, Delivery
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import Unavailable, UndecodableMessage
from shared.messages import UsageRecord, decode_record
from shared.telemetry import incidents
from shared.telemetry.metrics import Catalog
from shared.topology import LEDGER_RECORDS, Publishers

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 500
"""Records in one transaction."""
_MAX_NOTED = 100_000
_PREFETCH = 2 * _MAX_AT_ONCE
_GATHERING_S = 0.2
"""Seconds for which records gather before they are written."""
_LAST_WRITES_S = 5.0
_RETRY_PAUSE_S = 1.0
_SWEEP_INTERVAL_S = 600.0


class _Held(NamedTuple):
    """A record that is not written yet."""

    delivery: Delivery
    record: UsageRecord


class UsageRecorder:
    """Writes records, a few hundred in a transaction, and acknowledges them then.

    A record that is written but not acknowledged comes again, and has no effect. Gateways share the
    work.
    """

    def __init__(
        self,
        bus: Bus,
        store: Store,
        publishers: Publishers,
        catalog: Catalog,
        retention_s: float,
        on_record: Callable[[UsageRecord], None],
    ) -> None:
        """``on_record`` is called with each record before it is written."""
        self._bus = bus
        self._store = store
        self._publishers = publishers
        self._retention_s = retention_s
        self._on_record = on_record
        self._held: list[_Held] = []
        self._noted: list[UsageRecord] = []
        """The records of this gateway that are not written yet."""
        self._noting: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._records = _counter(catalog)

    async def run(self) -> None:
        """Write records until cancelled."""
        async with (
            asyncio.TaskGroup() as tasks,
            Subscription(
                self._bus, LEDGER_RECORDS.name, prefetch=_PREFETCH, declare=(LEDGER_RECORDS,)
            ) as subscription,
        ):
            async for item in subscription:
                if isinstance(item, Attached | Lost):
                    self._held.clear()  # those deliveries are back in the queue
                    continue
                await self._hold(item)
                if self._writing is None or self._writing.done():
                    self._writing = tasks.create_task(self._write_held())

    def note(self, record: UsageRecord) -> None:
        """Write the record of a request that no worker records, in the background."""
        if len(self._noted) >= _MAX_NOTED:
            self._report_unwritten(1, "the database is out of reach for too long")
            return
        self._noted.append(record)
        if self._noting is None or self._noting.done():
            self._noting = asyncio.create_task(self._write_noted())

    async def wait_written(self) -> None:
        """Wait until the records that have arrived are written, but not for long."""
        writing = [task for task in (self._writing, self._noting) if task is not None]
        if writing:
            await asyncio.wait(writing, timeout=_LAST_WRITES_S)

    async def sweep(self) -> None:
        """Delete old records again and again, until cancelled."""

        async def sweep(state: StoredState) -> None:
            num_swept = await state.usage.sweep(time.time() - self._retention_s)
            if num_swept:
                logger.info("old usage records deleted", extra={"records": num_swept})

        await self._store.keep_swept(sweep, _SWEEP_INTERVAL_S)

    async def _hold(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            record = decode_record(message.body)
        except UndecodableMessage as error:
            return await self._drop(delivery, error.message)
        if not self._publishers.is_trusted(message.user_id):
            return await self._drop(delivery, f"user {message.user_id!r} may not record usage")
        self._on_record(record)
        self._held.append(_Held(delivery, record))
        return None

    async def _write_noted(self) -> None:
        while self._noted:
            await asyncio.sleep(_GATHERING_S)
            batch = self._noted[:_MAX_AT_ONCE]
            try:
                state = await self._store.open()
                num_new = await state.usage.write(batch)
            except Unavailable:
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            except Exception as error:  # noqa: BLE001 (later records must be written)
                incidents.report("task", "usage records not written", error)
                self._report_unwritten(len(batch), type(error).__name__)
            else:
                self._records.labels("written").inc(num_new)
            del self._noted[: len(batch)]

    def _report_unwritten(self, num_records: int, reason: str) -> None:
        logger.error("usage record dropped", extra={"records": num_records, "reason": reason})
        self._records.labels("dropped").inc(num_records)

    async def _write_held(self) -> None:
        while self._held:
            if len(self._held) < _MAX_AT_ONCE:
                await asyncio.sleep(_GATHERING_S)
            batch, self._held = self._held[:_MAX_AT_ONCE], self._held[_MAX_AT_ONCE:]
            if batch:
                await self._write(batch)

    async def _write(self, batch: Sequence[_Held]) -> None:
        """Write records, and retry until the database takes them. A record whose own values are
        refused is dropped."""
        is_reported = False
        while True:
            try:
                state = await self._store.open()
                num_new = await state.usage.write([held.record for held in batch])
                break
            except Exception as error:  # noqa: BLE001 (a record must not be lost with any)
                if refuses_values(error):
                    return await self._write_singly(batch, error)
                if not is_reported:
                    fields = {"records": len(batch), "reason": _reason(error)}
                    logger.warning("usage records not written, retrying", extra=fields)
                is_reported = True
                await asyncio.sleep(_RETRY_PAUSE_S)
        self._records.labels("written").inc(num_new)
        self._records.labels("repeated").inc(len(batch) - num_new)
        for held in batch:
            await held.delivery.ack()
        return None

    async def _write_singly(self, batch: Sequence[_Held], error: Exception) -> None:
        """Write each record on its own, so that an invalid record does not stop all others."""
        if len(batch) > 1:
            for held in batch:
                await self._write([held])
            return
        held = batch[0]
        incidents.report(
            "task", "usage record not written", error, request_id=held.record.request_id
        )
        await self._drop(held.delivery, type(error).__name__)

    async def _drop(self, delivery: Delivery, reason: str) -> None:
        fields = {"request_id": delivery.message.correlation_id, "reason": reason}
        logger.error("usage record dropped", extra=fields)
        self._records.labels("dropped").inc()
        await delivery.reject()


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, Unavailable) else repr(error)


def _counter(catalog: Catalog) -> Counter:
    return catalog.counter(
        "warren_gateway_usage_records_total",
        "Usage records that arrived here, by result: written to the database, repeated (the "
        "request was recorded before), or dropped because they are not valid.",
        "result",
        begin=("written", "repeated", "dropped"),
    )
