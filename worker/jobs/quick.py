"""Quick jobs: tokenization, detokenization and embeddings, which do not queue behind generations.

A job is acknowledged once its answer is confirmed, or if no reader is left. Answering a job twice
is harmless, so a job whose handling fails unexpectedly is requeued. It has no log that counts its
crashes: a job that was returned `_MAX_RETURNS` times is dead-lettered, and its reader gets an
error.
"""

import asyncio
import logging
import time
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import Span

from shared import topology
from shared.bus.base import Bus
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import (
    BusError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    UndecodableMessage,
    WarrenError,
    WorkerLost,
)
from shared.messages import (
    Detokenized,
    DetokenizeJob,
    Embedded,
    EmbeddingJob,
    Failed,
    QuickAnswer,
    QuickJob,
    Tokenized,
    TokenizeJob,
    UsageRecord,
    decode_quick_job,
)
from shared.telemetry import incidents, requests
from shared.topology import Publishers
from worker.decode.embedding import (
    MAX_TEXT_BYTES,
    ComputeTime,
    embedder_of,
    embedding_prompt,
)
from worker.decode.served_model import ServedModel
from worker.jobs.admission import TenantAdmission
from worker.jobs.delivery import (
    JobDelivery,
    Ledger,
    ReplyPublisher,
    recorded,
    refuse,
    tell_end,
    turn_away,
)
from worker.jobs.metrics import JobMetrics
from worker.jobs.observation import (
    FAULTS,
    record_queue_span,
    report_ignored,
    report_turned_away,
    report_undecodable,
    start_run_span,
)

logger = logging.getLogger(__name__)

_PREFETCH = 32
"""More than are answered at once, so that the tenants among them take turns."""
_MAX_RETURNS = 4
"""The returns after which a job is dead-lettered. A poison generation crashes two workers beside
other jobs, and one more before that if it generates tokens first. While it runs alone, no quick job
runs."""


class QuickConsumer:
    """Answers the quick jobs of a model, a few at a time."""

    def __init__(
        self,
        bus: Bus,
        model: ServedModel,
        publishers: Publishers,
        metrics: JobMetrics,
        ledger: Ledger,
        tenants: TenantAdmission,
        worker: str = "",
    ) -> None:
        """``worker`` is the address that log lines name."""
        self._bus = bus
        self._metrics = metrics
        self._ledger = ledger
        self._tenants = tenants
        self._worker = worker
        self._model = model
        self._publishers = publishers
        self._queue = topology.jobs_queue(model.name, "quick")
        self._subscription: Subscription | None = None
        self._taking = asyncio.Lock()
        """Held while jobs may be taken, and until the last job taken is answered."""
        self._answering: set[asyncio.Task[None]] = set()
        self._may_take = asyncio.Event()
        self._may_take.set()
        self._is_stopped = False

    async def stop(self) -> None:
        """Stop consuming permanently; the jobs taken are still answered."""
        self._is_stopped = True
        with incidents.survived("task", "job consumer not stopped", queue=self._queue.name):
            await self.pause()

    async def pause(self) -> None:
        """Stop consuming until `resume`; the jobs stay in the queue or go to other workers."""
        self._may_take.clear()
        if self._subscription is not None:
            await self._subscription.stop()

    async def wait_idle(self) -> None:
        """Return when all jobs taken are done."""
        if not self._may_take.is_set():  # jobs that have just arrived may not have been taken yet
            async with self._taking:
                return
        while self._answering:
            await asyncio.wait(self._answering)

    def resume(self) -> None:
        if not self._is_stopped:
            self._may_take.set()

    async def run(self) -> None:
        """Answer jobs until cancelled; unanswered jobs are then requeued."""
        while True:
            await self._may_take.wait()
            await self._consume()

    async def _consume(self) -> None:
        async with (
            self._taking,
            Subscription(
                self._bus, self._queue.name, prefetch=_PREFETCH, declare=(self._queue,)
            ) as subscription,
            asyncio.TaskGroup() as answers,
        ):
            self._subscription = subscription
            if not self._may_take.is_set():  # paused while this waited for its turn
                await subscription.stop()
            async for item in subscription:
                if not isinstance(item, Attached | Lost):
                    is_trusted = self._publishers.is_trusted(item.message.user_id)
                    delivery = JobDelivery(item, subscription, is_trusted=is_trusted)
                    task = answers.create_task(self._serve(delivery))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)

    async def _serve(self, delivery: JobDelivery) -> None:
        """Answer a delivery. No error propagates, because it would end all jobs taken."""
        try:
            await self._take(delivery)
        except Exception as error:  # noqa: BLE001 (any error is reported)
            facts = {"request_id": delivery.message.correlation_id}
            incidents.report("job", "job returned to its queue", error, **facts)
            await delivery.give_back()

    async def _take(self, delivery: JobDelivery) -> None:
        message = delivery.message
        try:
            job = decode_quick_job(message.body, message.content_type)
            job = self._publishers.admitted(job, message)
        except UndecodableMessage as error:
            report_undecodable(message, error, self._metrics, self._worker)
            return await refuse(self._bus, delivery, error, self._publishers)
        report_ignored(job, delivery.note_ignored_fields(job), self._worker)
        try:
            terms = await self._tenants.terms_of(job, delivery)
        except WarrenError as error:
            report_turned_away(job, error, self._metrics, self._worker)
            return await turn_away(self._bus, delivery, error)
        # A connection that is lost returns jobs, too.
        is_poison = delivery.num_returns >= _MAX_RETURNS and self._bus.is_settled
        began, compute = time.monotonic(), ComputeTime()
        if not delivery.num_returns:
            record_queue_span(job, time.time())
        with trace.use_span(start_run_span(job, "quick", self._worker), end_on_exit=True) as span:
            answered = _worker_lost() if is_poison else await self._answer(job, compute)
            self._observe(job, answered, span, is_dead_lettered=is_poison)
        record = _usage(job, answered, compute.seconds, time.monotonic() - began)
        recording = None if record is None else self._ledger.record(record)
        if recording is not None:
            await recorded(recording)
        publisher = ReplyPublisher(self._bus, delivery, message.correlation_id)
        try:
            await _publish(publisher, answered)
        except BusError as error:
            facts = {"request_id": job.request_id, "reason": error.code}
            logger.info("answer dropped", extra=facts)
        if recording is not None:
            await asyncio.shield(recording)
        await (delivery.reject() if is_poison else delivery.ack())
        if terms.is_counted:
            num_tokens = 0 if record is None else record.num_prompt_tokens
            await tell_end(self._bus, job.request_id, num_tokens)
        return None

    def _observe(
        self,
        job: QuickJob,
        answered: QuickAnswer | Failed,
        span: Span,
        *,
        is_dead_lettered: bool,
    ) -> None:
        """Write the line of a job, count it, and complete its span."""
        code = answered.code if isinstance(answered, Failed) else "completed"
        outcome = "dead_lettered" if is_dead_lettered else code
        tenant = self._metrics.tenant_label(job.tenant)
        self._metrics.jobs.labels(self._model.name, "quick", tenant, outcome).inc()
        span.set_attributes({"warren.kind": type(job).__name__, "warren.outcome": outcome})
        facts = {"worker": self._worker, "kind": type(job).__name__, "outcome": outcome}
        if is_dead_lettered:
            self._metrics.dead_letters.labels(self._model.name, code).inc()
            requests.write_line("job dead-lettered", job, facts | {"reason": code}, is_warning=True)
        else:
            requests.write_line(
                "job refused" if isinstance(answered, Failed) else "job ended",
                job,
                facts,
                is_warning=outcome in FAULTS,
            )

    async def _answer(self, job: QuickJob, compute: ComputeTime) -> QuickAnswer | Failed:
        try:
            async with asyncio.timeout(
                None if job.deadline is None else job.deadline - time.time()
            ):
                await asyncio.sleep(0)  # where a deadline that has already passed takes effect
                return await answer(job, self._model, compute)
        except TimeoutError:
            return _failed(DeadlineExceeded("The request's deadline has passed."))
        except WarrenError as error:
            return _failed(error)
        except Exception as error:  # noqa: BLE001 (a bug fails only this job)
            incidents.report("job", "job failed", error, request_id=job.request_id)
            return _failed(InternalError("The worker failed on this request."))


def _usage(
    job: QuickJob, answered: QuickAnswer | Failed, compute_s: float, run_s: float
) -> UsageRecord | None:
    """What a job has used, which ends now; None for tokenization, which does not count."""
    if not isinstance(job, EmbeddingJob):
        return None
    num_tokens = sum(answered.num_prompt_tokens) if isinstance(answered, Embedded) else 0
    return UsageRecord(
        request_id=job.request_id,
        tenant=job.tenant,
        key_id=job.key_id,
        model=job.model,
        job_class="quick",
        outcome=answered.code if isinstance(answered, Failed) else "completed",
        attempt=1,
        num_prompt_tokens=num_tokens,
        compute_s=compute_s,
        run_s=run_s,
        ended_at=time.time(),
    )


async def _publish(publisher: ReplyPublisher, answer: QuickAnswer | Failed) -> None:
    try:
        await publisher.publish(answer)
    except MessageTooLarge:
        reason = "The answer is too long for one message: ask for less at once."
        await publisher.publish(_failed(InvalidRequest(reason)))


async def answer(job: QuickJob, model: ServedModel, compute: ComputeTime) -> QuickAnswer:
    """Compute the answer to a quick job. Raises `RequestError`."""
    match job:
        case TokenizeJob():
            return await model.texts.run(job.tenant, partial(_tokenize, job, model))
        case DetokenizeJob():
            return await model.texts.run(job.tenant, partial(_detokenize, job, model))
        case EmbeddingJob():
            return await _embed(job, model, compute)


def _tokenize(job: TokenizeJob, model: ServedModel) -> Tokenized:
    token_ids = model.tokenizer.encode(job.prompt, may_be_empty=True, max_bytes=MAX_TEXT_BYTES)
    return Tokenized(
        request_id=job.request_id,
        token_ids=tuple(token_ids),
        tokens=model.tokenizer.entries(token_ids),
        max_seq_len=model.max_seq_len,
    )


def _detokenize(job: DetokenizeJob, model: ServedModel) -> Detokenized:
    unknown = [t for t in job.token_ids if t >= model.tokenizer.vocab_size]
    if unknown:
        raise InvalidRequest(
            f"Token id {unknown[0]} is not in the vocabulary of {model.tokenizer.vocab_size}.",
            param="tokens",
        )
    return Detokenized(request_id=job.request_id, text=model.tokenizer.decode(job.token_ids))


async def _embed(job: EmbeddingJob, model: ServedModel, compute: ComputeTime) -> Embedded:
    embedder = embedder_of(model, job.num_dimensions)
    prompts = [
        await model.texts.run(job.tenant, partial(embedding_prompt, prompt, model))
        for prompt in job.prompts
    ]
    vectors: list[tuple[float, ...]] = []
    steps = compute.of(embedder.embed(prompts, job.num_dimensions))
    while (more := await asyncio.wrap_future(embedder.submit(steps))) is not None:
        vectors += more
    return Embedded(
        request_id=job.request_id,
        vectors=tuple(vectors),
        num_prompt_tokens=tuple(map(len, prompts)),
    )


def _worker_lost() -> Failed:
    return _failed(WorkerLost("The request crashed the workers that ran it."))


def _failed(error: WarrenError) -> Failed:
    return Failed(code=error.code, message=error.message, param=error.param)
