"""Answers one line of a batch like any other request, with the same parsing, checks, logs and
rendering, but with the job in the batch class."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.api.bodies.quick import EmbeddingRequest, QuickDraft
from gateway.api.bodies.submission import submission
from gateway.api.observation import Observation
from gateway.api.routes.generation import Reading, gather
from gateway.batches.lines import ENDPOINTS, LineOutcome, RequestLine, request_id_of
from gateway.intake.body import parsed
from gateway.intake.signer import hash_body
from gateway.log.cursor import Departure
from gateway.store.batches import BatchRecord
from gateway.wiring import Gateway
from shared.errors import (
    BusError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    MessageTooLarge,
    Overloaded,
    StreamExpired,
    TakenOver,
    Unavailable,
    WarrenError,
)
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_PASSING = (
    Overloaded,
    Unavailable,
    BusError,
    TakenOver,
    StreamExpired,
    Cancelled,
    DeadlineExceeded,
)
"""Errors that are no answer: the line is tried again. A line's log may be read or deleted through
the streams' endpoints, like any other. The deadline of a job is the end of the batch's window."""
LOG_RETENTION_S = 120.0
"""Seconds for which the log of a line waits for the next gateway; longer than a lease."""

Record = Callable[[LineOutcome], Awaitable[None]]


@dataclass(slots=True)
class LineServer:
    """Answers lines of one batch."""

    gateway: Gateway
    batch: BatchRecord
    is_cancelled: bool = False
    """Whether lines that stop end their jobs. Otherwise the jobs go on, for the gateway that
    continues the batch."""

    async def answer(self, number: int, line: RequestLine, record: Record) -> None:
        """Answer a line and ``record`` its outcome, which may be an error. The job's log is deleted
        only after that."""
        request_id = request_id_of(self.batch.id, number, ENDPOINTS[line.url].id_prefix)
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with self._answered(request_id, line) as answer:
                    return await record(LineOutcome(request_id, answer))
            except MessageTooLarge as error:
                return await record(LineOutcome(request_id, error))
            except _PASSING as error:
                facts = {"batch": self.batch.id, "line": number, "code": error.code}
                logger.debug("batch line retried", extra=facts)
            except WarrenError as error:
                return await record(LineOutcome(request_id, error))
            except Exception as error:  # noqa: BLE001 (one line's bug is one line's failure)
                facts = {"batch": self.batch.id, "line": number}
                incidents.report("request", "batch line failed", error, **facts)
                failure = InternalError("The gateway failed on this request.")
                return await record(LineOutcome(request_id, failure))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    @asynccontextmanager
    async def _answered(self, request_id: str, line: RequestLine) -> AsyncIterator[object]:
        raw_body = bytes(line.body)
        request = await parsed(ENDPOINTS[line.url].read, raw_body)
        if isinstance(request, EmbeddingRequest):
            yield await self._embeddings(request_id, request)
            return
        with request.in_own_words():
            async with self._generation(request_id, request, raw_body) as answer:
                yield answer

    async def _embeddings(self, request_id: str, request: EmbeddingRequest) -> object:
        gateway, batch = self.gateway, self.batch
        assert request.model is not None
        deadline = time.time() + gateway.settings.request_timeout_s
        draft = QuickDraft(request.model, request_id, deadline, batch.tenant)
        request.check(await gateway.workers.find(request.model))
        return await request.answer(gateway.quick, draft)

    @asynccontextmanager
    async def _generation(
        self, request_id: str, request: Reading, raw_body: bytes
    ) -> AsyncIterator[object]:
        gateway, batch, body = self.gateway, self.batch, request.body
        submitted = submission(
            body,
            request_id=request_id,
            created_at=time.time(),
            deadline=float(batch.expires_at),
            served=await gateway.workers.find(body.model),
            tenant=batch.tenant,
            body_hash=hash_body(raw_body),
            echoed=request.echoed,
            is_detached=True,  # its job goes on while no gateway runs the batch
        )
        submitted = await submitted.checked()
        log = gateway.reply_queues.named(request_id, LOG_RETENTION_S, may_exist=True)
        job, facts = submitted.job, submitted.facts
        with (
            gateway.tenant_usage.request(batch.tenant) as usage,
            Observation(gateway.metrics, job, {}, usage) as observation,
        ):
            async with gateway.relays.open(log, job, facts, lane="batch") as relay:
                observation.accepted(relay)
                # Unless a departure is recorded, the relay ends the job and deletes the log.
                try:
                    answer = await gather(relay, submitted, observation)
                except asyncio.CancelledError:
                    if not self.is_cancelled:
                        relay.close(Departure.LEFT)
                    raise
                try:
                    yield answer
                except BaseException:  # it was not recorded
                    relay.close(Departure.LEFT)
                    raise
