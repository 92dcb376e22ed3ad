"""Answers a line of a batch like any other request, with the same parsing, checks, logs and
rendering, but with the job in the batch class."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from gateway.api.bodies.quick import EmbeddingRequest, Embeddings, QuickDraft
from gateway.api.bodies.submission import Submission, submission
from gateway.api.observation import Observation
from gateway.api.routes.generation import ParsedRequest, read_answer
from gateway.batches.closing import Closing
from gateway.batches.key_limits import LineLimits, LineSlot
from gateway.batches.lines import (
    ENDPOINTS,
    LINE_DECODER,
    InputLine,
    LineOutcome,
    LineRequest,
    request_id_of,
)
from gateway.batches.twins import ComputedAnswer, TwinRole
from gateway.intake.signer import hash_body
from gateway.log.cursor import Departure, LogCursor
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog
from gateway.once.sameness import sameness_of
from gateway.store.batches import BatchRecord
from gateway.wiring import Gateway
from shared.backoff import Backoff
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
from shared.log import Relay
from shared.messages import JobClass, UsageRecord
from shared.messages.token_estimates import tokens_of, tokens_of_quick
from shared.off_loop import off_loop
from shared.telemetry import incidents, requests

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
Attempt = Callable[[], AbstractAsyncContextManager[LineOutcome]]
"""An attempt to answer a line: a context that has the answer and ends once it is recorded."""


class LineServer:
    """Answers lines of a batch, within the limits of the API key that ordered it."""

    def __init__(self, gateway: Gateway, batch: BatchRecord) -> None:
        self.gateway = gateway
        self.batch = batch
        self.ends_jobs = False
        """Whether lines that stop end their jobs. Otherwise the jobs go on, for the gateway that
        continues the batch."""
        self.closing = Closing(batch)
        self._limits = LineLimits(batch, gateway.keys, gateway.limits)
        self._was_late = False

    async def answer(self, line: InputLine, record: Record, role: TwinRole | None = None) -> None:
        """Answer a line and ``record`` its outcome, which may be an error. The job's log is deleted
        only after that. ``role`` is the part of the line among equal lines."""
        request_id = self.request_id(line.number)
        attributes: dict[str, str | int] = {
            "warren.request_id": request_id,
            "warren.batch": self.batch.id,
            "warren.line": line.number,
        }
        # A line has no parent: the request that created its batch may have been days ago.
        with requests.request_span("gateway.batch_line", SpanKind.INTERNAL, attributes, {}):
            computed = None
            if role is not None and not role.is_first:
                computed = await role.group.wait()
            async with self._limits.slot() as slot:
                if computed is not None:
                    attempt = partial(self._repeated, request_id, computed, slot)
                else:
                    attempt = partial(self._answered, request_id, line, slot, role)
                await self._answer(request_id, line, attempt, record)

    async def stop(self, request_id: str) -> None:
        """End the job of a line, if a gateway has published a job, and delete its log."""
        try:
            await self.gateway.cancel(request_id, None)
        except StreamExpired:
            pass
        except WarrenError as error:  # it goes on to its end
            fields = {"batch": self.batch.id, "request_id": request_id, "code": error.code}
            logger.warning("job of a batch line not stopped", extra=fields)

    def request_id(self, number: int) -> str:
        return request_id_of(self.batch.id, number, ENDPOINTS[self.batch.endpoint].id_prefix)

    @asynccontextmanager
    async def _repeated(
        self, request_id: str, computed: ComputedAnswer, slot: LineSlot
    ) -> AsyncIterator[LineOutcome]:
        """The answer to an equal line as the answer to this line. Its use is noted only once it is
        recorded: what is not recorded is repeated by another gateway."""
        gateway = self.gateway
        job = structs.replace(computed.job, request_id=request_id, is_counted=False)
        answer = computed.rendered(request_id)
        grant = await slot.take(tokens_of(job), job)
        with Observation(gateway.metrics, job, "batch", {}) as observation:
            observation.read_all(computed.events)
        grant.settle(observation.total_tokens)
        yield LineOutcome(request_id, answer)
        gateway.recorder.note(
            UsageRecord(
                request_id=request_id,
                tenant=job.tenant,
                key_id=job.key_id,
                model=job.model,
                job_class="batch",
                outcome="completed",
                num_prompt_tokens=computed.num_prompt_tokens,
                num_output_tokens=computed.num_output_tokens,
                ended_at=time.time(),
                is_cached=True,
            )
        )
        gateway.executions.count(job.model, "attached")

    async def _answer(
        self, request_id: str, line: InputLine, attempt: Attempt, record: Record
    ) -> None:
        """Try until the line has an outcome, and record it."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                async with attempt() as outcome:
                    return await record(outcome)
            except MessageTooLarge as error:
                return await record(LineOutcome(request_id, error))
            except _PASSING as error:
                fields = {"batch": self.batch.id, "line": line.number, "code": error.code}
                logger.debug("batch line retried", extra=fields)
            except WarrenError as error:
                return await record(LineOutcome(request_id, error))
            except Exception as error:  # noqa: BLE001 (one line's bug is one line's failure)
                fields = {"batch": self.batch.id, "line": line.number}
                incidents.report("request", "batch line failed", error, **fields)
                failure = InternalError("The gateway failed on this request.")
                return await record(LineOutcome(request_id, failure))
            backoff.lasted()
            await asyncio.sleep(backoff.drawn_pause_s)

    @asynccontextmanager
    async def _answered(
        self, request_id: str, line: InputLine, slot: LineSlot, role: TwinRole | None
    ) -> AsyncIterator[LineOutcome]:
        num_bytes = await line.num_bytes()
        request, body_hash = await off_loop(partial(self._read, line), num_bytes)
        body = request if isinstance(request, EmbeddingRequest) else request.body
        trace.get_current_span().set_attribute("model", body.model or "")
        if isinstance(request, EmbeddingRequest):
            answer = await self._embeddings(request_id, request, slot, num_bytes)
            yield LineOutcome(request_id, answer)
            return
        with request.translate_errors():
            async with self._generation(
                request_id, request, body_hash, slot, num_bytes, role
            ) as outcome:
                yield outcome

    def _read(self, line: InputLine) -> tuple[LineRequest, str]:
        """The request of a line, and the hash of its body. No copy of the body is kept."""
        assert line.text is not None
        raw_body = bytes(LINE_DECODER.decode(line.text).body)
        request = ENDPOINTS[self.batch.endpoint].read(raw_body)
        if isinstance(request, ParsedRequest):
            request = request.with_receipt(self.gateway, self._limits.key, raw_body)
        return request, hash_body(raw_body)

    async def _embeddings(
        self, request_id: str, request: EmbeddingRequest, slot: LineSlot, num_bytes: int
    ) -> object:
        gateway, batch, key = self.gateway, self.batch, self._limits.key
        assert request.model is not None
        key.require_model(request.model)
        draft = QuickDraft(
            request.model,
            request_id,
            deadline=time.time(),
            tenant=batch.tenant,
            key_id=key.key_id,
            trace=requests.inject(),
        )
        request.check(await gateway.workers.find(request.model))
        job = await off_loop(partial(request.job, draft), num_bytes)
        grant = await slot.take(tokens_of_quick(job))
        async with gateway.quick.spare_slot(request.model):
            grant.note_published()
            deadline = time.time() + gateway.settings.request_timeout_s
            answer = await request.answer(gateway.quick, structs.replace(job, deadline=deadline))
        if isinstance(answer, Embeddings):
            grant.settle(answer.usage.total_tokens)
        return answer

    @asynccontextmanager
    async def _generation(
        self,
        request_id: str,
        request: ParsedRequest,
        body_hash: str,
        slot: LineSlot,
        num_bytes: int,
        role: TwinRole | None,
    ) -> AsyncIterator[LineOutcome]:
        gateway, batch, body, key = self.gateway, self.batch, request.body, self._limits.key
        key.require_model(body.model)
        build = partial(
            submission,
            body,
            request_id=request_id,
            created_at=time.time(),
            # The same if another gateway publishes the line again.
            template_time=float(batch.created_at),
            deadline=float(batch.expires_at),
            served=await gateway.workers.find(body.model),
            tenant=batch.tenant,
            body_hash=body_hash,
            trace=requests.inject(),
            echoed=request.echoed,
            is_detached=True,  # its job continues while no gateway runs the batch
        )
        submitted = (await off_loop(build, num_bytes)).limited(key)
        submitted = await submitted.check_constraint()
        if request.request_sha256:
            submitted = submitted.with_receipt(request.request_sha256)
        log = gateway.reply_queues.named(request_id, LOG_RETENTION_S, may_exist=True)
        if slot.grant is None and not await self._is_begun(log):
            await slot.take(tokens_of(submitted.job), submitted.job)
            # The worker measures the time in the queue from here.
            job = structs.replace(submitted.job, created_at=time.time())
            submitted = submitted._replace(job=job)
        job, facts, grant = submitted.job, submitted.facts, slot.grant
        job_class = self._job_class(job.model)
        with Observation(gateway.metrics, job, job_class, {}) as observation:
            async with gateway.relays.open(log, job, facts, lane=job_class) as relay:
                if grant is not None:
                    grant.note_published()
                observation.accepted(relay)
                # Unless a departure is recorded, the relay ends the job and deletes the log.
                try:
                    answer = await read_answer(relay, submitted, observation, gateway.receipts.sign)
                except asyncio.CancelledError:
                    if not self.ends_jobs:
                        relay.close(Departure.LEFT)
                    raise
                finally:
                    if relay.has_ended and grant is not None:
                        grant.settle(observation.total_tokens)
                    elif relay.has_ended:  # another gateway has counted it
                        gateway.limits.end_left(request_id)
                if role is not None:
                    role.group.give(self._computed(submitted, relay))
                try:
                    yield LineOutcome(request_id, answer, job_class == "interactive")
                except BaseException:  # it was not recorded
                    relay.close(Departure.LEFT)
                    raise

    def _computed(self, submitted: Submission, relay: LogRelay) -> ComputedAnswer | None:
        """The answer that ``relay`` has read, if every run of the job gives it."""
        job = submitted.job
        same = sameness_of(job, b"", self.gateway.workers.of_model(job.model))
        if same is None or submitted.rendering.receipt is not None:
            return None
        cursor = LogCursor(relay.claim, submitted.facts)
        cursor.begin(is_renewed=True)
        actions = cursor.read(relay.cursor.restored())
        events = [action.event for action in actions if isinstance(action, Relay)]
        return ComputedAnswer(job, submitted.rendering, events)

    def _job_class(self, model: str) -> JobClass:
        """The class in which the next line is published."""
        job_class = self.closing.job_class()
        if job_class == "interactive":
            self.gateway.metrics.promoted_lines.labels(model).inc()
            if not self._was_late:
                self._was_late = True
                fields = {"batch": self.batch.id, "lines_left": self.closing.num_left}
                logger.warning("batch late, its requests have interactive priority", extra=fields)
        return job_class

    async def _is_begun(self, log: ReplyLog) -> bool:
        """Whether another gateway has published the job of this log, and counted it: it is read
        before it expires, whatever the limits are now."""
        if self.batch.fence == 1:
            return False
        await log.find()
        return await self.gateway.bus.inspect(log.queue.name) is not None
