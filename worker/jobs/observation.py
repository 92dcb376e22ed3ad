"""Follows a run of a job: writes its log lines, its metrics and its spans."""

import secrets
import time
from contextlib import suppress

import msgspec
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from shared.bus.base import Message
from shared.dead_letters import name_of
from shared.errors import InternalError, NotFinite, OutOfMemory, UndecodableMessage, WarrenError
from shared.messages import (
    Completed,
    Failed,
    Finished,
    GenerationJob,
    JobClass,
    QuickJob,
    Replaced,
    ReplyEvent,
    UsageRecord,
)
from shared.telemetry import requests
from worker.decode.bridge import Generations
from worker.jobs.metrics import JobMetrics
from worker.jobs.run import Outcome, Record

_STEP_INTERVAL = 64
"""The engine's step is recorded as a span at a run's first token, and then once in so many."""
FAULTS = (InternalError.code, NotFinite.code, OutOfMemory.code)
"""Outcomes that are the worker's own failures, not the client's."""
_OUTCOMES = {
    Outcome.SUPERSEDED: "superseded",
    Outcome.HANDED_OVER: "handed_over",
    Outcome.REQUEUED: "handed_over",
    Outcome.QUARANTINED: "moved",
    Outcome.MOVED: "moved",
    Outcome.REPUBLISHED: "moved",
    Outcome.DEAD_LETTERED: "dead_lettered",
}


def start_run_span(job: GenerationJob | QuickJob, job_class: str, worker: str) -> trace.Span:
    """Start the span of a run."""
    facts = {
        "warren.request_id": job.request_id,
        "warren.worker": worker,
        "warren.class": job_class,
        "gen_ai.request.model": job.model,
    }
    context = requests.extract(job.trace)
    return requests.tracer.start_span("worker.run", context, SpanKind.CONSUMER, facts)


def record_queue_span(job: GenerationJob | QuickJob, arrived_at: float) -> None:
    """Record the span of the queue before a run, which the job left at this Unix time."""
    if not job.created_at:
        return
    context, facts = requests.extract(job.trace), {"warren.request_id": job.request_id}
    queued_at = min(job.created_at, arrived_at)  # a publisher's clock may be ahead
    queued = requests.tracer.start_span(
        "worker.queue", context, SpanKind.CONSUMER, facts, start_time=int(queued_at * 1e9)
    )
    queued.end(int(arrived_at * 1e9))


class JobObservation:
    """A run, from the delivery of its job to its end.

    Its span ``worker.run`` has the spans of prefill, decode and sampled steps as children, and a
    link to the run that it replaces.
    """

    def __init__(
        self,
        job: GenerationJob,
        job_class: JobClass,
        *,
        worker: str,
        num_returns: int,
        metrics: JobMetrics,
        generations: Generations,
    ) -> None:
        self._job = job
        self._num_choices = job.total_choices
        self._class: JobClass = job_class
        self._worker = worker
        self._num_returns = num_returns
        self._metrics = metrics
        self._generations = generations
        self._of_class = metrics.of_class(job_class)
        self._tenant = metrics.tenant_label(job.tenant)
        self._tokens = metrics.tokens_of(job_class, self._tenant)
        self._arrived_at = self._moved_at = self._submitted_at = time.monotonic()
        self._first_at: float | None = None
        self._attempt = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._compute_s = 0.0
        self._error_code: str | None = None
        self._finish_reason: str | None = None
        self._refusal: dict[str, object] = {}
        self.hand_over_reason = "replaced by another run"
        now = self._took_at = time.time()
        self._queue_s: float | None = None
        """Seconds since the creation of the job, in which other runs may have had it."""
        if job.created_at:
            # A publisher's clock may be ahead, and other jobs would seem to be older than this job.
            metrics.taken(job_class, min(job.created_at, now))
            self._queue_s = max(0.0, now - job.created_at)
        self._has_counted_wait = False
        if not num_returns and not job.publication:
            self._count_wait()
        self._span = start_run_span(job, job_class, worker)
        self._context = trace.set_span_in_context(self._span)
        self.ticket = self._new_ticket()
        """The fencing token of the run. It is the id of the span, so that a run that replaces this
        run can link to it."""

    @property
    def waits_s(self) -> float:
        """Seconds since the last token, or since the arrival of the job."""
        return time.monotonic() - self._moved_at

    def begin(
        self,
        attempt: int,
        num_prompt_tokens: int,
        num_known_tokens: int,
        replaced: Replaced | None,
        other_numerics: str = "",
    ) -> None:
        """The job was submitted to the engine, with the tokens that its readers have already.

        ``other_numerics`` are the numerics of these tokens, if they differ from this worker's.
        """
        self._submitted_at = time.monotonic()
        self._attempt = attempt
        self._num_prompt_tokens = num_prompt_tokens
        labels = (self._metrics.model, self._class)
        self._metrics.prompt_tokens.labels(*labels, self._tenant).inc(num_prompt_tokens)
        facts: dict[str, object] = {"prompt_tokens": num_prompt_tokens}
        is_first = replaced is None and not num_known_tokens and not self._num_returns
        if attempt == 1 or is_first:
            self._count_wait()
            return self.write("job started", facts | {"queue_s": _rounded(self._queue_s)})
        reason = "redelivered" if replaced is None else replaced.reason
        self._metrics.takeovers.labels(*labels, reason.replace(" ", "_")).inc()
        facts["from_worker"] = None if replaced is None else replaced.worker
        facts |= {"at_token": num_known_tokens, "reason": reason}
        is_planned = replaced is not None and replaced.is_planned
        if other_numerics:
            is_planned = False
            self._metrics.numerics_changes.labels(self._metrics.model).inc()
            facts["from_numerics"] = other_numerics
        self.write("job taken over", facts, is_warning=not is_planned)
        if replaced is not None:
            self._link(replaced)
        return None

    def count_tokens(self, num_tokens: int) -> None:
        """Record the arrival of tokens."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._of_class.first_token_s.observe(now - self._arrived_at)
            self._of_class.prefill_s.observe(now - self._submitted_at)
            self._metrics.pace.learn_prompt(self._num_prompt_tokens, now - self._submitted_at)
            self._record("worker.prefill", now - self._submitted_at)
            self._record_step()
        elif num_tokens:
            per_choice = max(1.0, num_tokens / self._num_choices)
            self._of_class.token_s.observe((now - self._moved_at) / per_choice)
            if (
                self._num_tokens // _STEP_INTERVAL
                < (self._num_tokens + num_tokens) // _STEP_INTERVAL
            ):
                self._record_step()
        self._moved_at = now
        self._num_tokens += num_tokens
        self._tokens.inc(num_tokens)

    def computed(self, compute_s: float) -> None:
        """Take note of machine time that the job has used."""
        self._compute_s += compute_s

    def refuse(self, needed_s: float, left_s: float) -> None:
        """The job is hopeless: its run ends before it begins."""
        self._metrics.hopeless_jobs.labels(self._metrics.model, self._class).inc()
        self._refusal = {"needed_s": _rounded(needed_s), "left_s": _rounded(left_s)}

    def published(self, event: ReplyEvent) -> None:
        """Learn how the run ends from the events that it publishes."""
        match event:
            case Failed():
                self._error_code = event.code
            case Finished():
                self._finish_reason = event.finish_reason
            case Completed():
                self._finish_reason = event.choices[-1].finish_reason
            case _:
                pass

    def recorded(self, record: Record) -> UsageRecord:
        """The record of the request, which ends now."""
        now = time.monotonic()
        began_at = self._submitted_at if self._attempt else now
        waited_s = 0.0 if self._queue_s is None else self._queue_s + began_at - self._arrived_at
        return UsageRecord(
            request_id=self._job.request_id,
            tenant=self._job.tenant,
            key_id=self._job.key_id,
            model=self._job.model,
            job_class=self._class,
            queue_s=waited_s,
            compute_s=self._compute_s,
            run_s=now - began_at,
            ended_at=time.time(),
            **msgspec.structs.asdict(record),
        )

    def end(self, outcome: Outcome | None) -> None:
        """The run has ended; None if an unexpected error ended it."""
        now = time.monotonic()
        duration_s = now - self._arrived_at
        label = self._outcome_label(outcome)
        labels = (self._metrics.model, self._class, self._tenant, label)
        self._metrics.jobs.labels(*labels).inc()
        of_class = self._of_class
        if self._attempt:
            of_class.job_s.observe(duration_s)
            of_class.prompt_tokens.observe(self._num_prompt_tokens)
            of_class.generation_tokens.observe(self._num_tokens)
            slot_s = (now - self._submitted_at) * self._num_choices
            self._metrics.learn(self._num_prompt_tokens + self._num_tokens, slot_s)
        if self._first_at is not None:
            of_class.decode_s.observe(now - self._first_at)
            num_tokens = self._num_tokens // self._num_choices
            if self._finish_reason is not None and num_tokens:
                self._metrics.pace.learn_answer(num_tokens, now - self._first_at)
            self._record("worker.decode", now - self._first_at)
        self._write_end(outcome, label, duration_s)
        if self._span.is_recording():
            self._span.set_attribute("warren.outcome", label)
            self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._span.end()

    def _write_end(self, outcome: Outcome | None, label: str, duration_s: float) -> None:
        facts: dict[str, object] = {
            "outcome": label,
            "finish_reason": self._finish_reason,
            "tokens": self._num_tokens,
            "duration_s": _rounded(duration_s),
        }
        if outcome is Outcome.DEAD_LETTERED:
            code = self._error_code or "unknown"
            self._metrics.dead_letters.labels(self._metrics.model, code).inc()
            self.write("job dead-lettered", facts | {"reason": code}, is_warning=True)
        elif label == "handed_over":
            self.write("job handed over", facts | {"reason": self.hand_over_reason})
        elif not self._attempt and self._error_code is not None:
            self.write("job refused", facts | self._refusal)
        else:
            self.write("job ended", facts, is_warning=label in FAULTS)

    def _outcome_label(self, outcome: Outcome | None) -> str:
        if outcome not in (Outcome.ANSWERED, Outcome.UNREAD):
            return "internal_error" if outcome is None else _OUTCOMES[outcome]
        if self._error_code is not None:
            return self._error_code
        return "unread" if self._finish_reason is None else "completed"

    def write(
        self, step: requests.Step, facts: dict[str, object], *, is_warning: bool = False
    ) -> None:
        """Write a line of the job, with the worker, the attempt and the execution's number, if the
        request may have several executions."""
        own: dict[str, object] = {"worker": self._worker, "class": self._class}
        own["attempt"] = self._attempt or self._num_returns + 1
        own["execution"] = self._job.execution or None
        requests.write_line(step, self._job, own | facts, is_warning=is_warning)

    def _count_wait(self) -> None:
        """Record the wait for a worker, unless an earlier run may have ended it: it is unknown when
        that run ended and the job became available again."""
        if self._has_counted_wait or self._queue_s is None:
            return
        self._has_counted_wait = True
        self._of_class.queue_s.observe(self._queue_s)
        record_queue_span(self._job, self._took_at)

    def _new_ticket(self) -> str:
        context = self._span.get_span_context()
        # Without an exporter, and if the trace is not sampled, the id is not the span's own.
        return f"{context.span_id:016x}" if self._span.is_recording() else secrets.token_hex(8)

    def _link(self, replaced: Replaced) -> None:
        if not self._span.is_recording():
            return
        with suppress(ValueError):  # a worker's that does not derive its tickets from spans
            trace_id = self._span.get_span_context().trace_id
            other = SpanContext(
                trace_id, int(replaced.ticket, 16), is_remote=True, trace_flags=TraceFlags(1)
            )
            facts = {"warren.reason": replaced.reason, "warren.worker": replaced.worker}
            self._span.add_link(other, facts)

    def _record(self, name: str, duration_s: float, **facts: int) -> None:
        """Record a span that ends now."""
        if not self._span.is_recording():
            return
        now = time.time()
        span = requests.tracer.start_span(
            name,
            self._context,
            attributes={"warren.request_id": self._job.request_id, **facts},
            start_time=int((now - duration_s) * 1e9),
        )
        span.end(int(now * 1e9))

    def _record_step(self) -> None:
        step = self._generations.load.last_step
        if step is not None:
            self._record(
                "engine.step",
                step.duration_s,
                **{
                    "warren.step.sequences": step.num_sequences,
                    "warren.step.tokens": step.num_tokens,
                },
            )


def report_ignored(job: GenerationJob | QuickJob, fields: str, worker: str) -> None:
    """Report the unknown fields of a job; they may be misspelled."""
    if fields:
        facts = {"worker": worker, "fields": fields}
        requests.write_line("fields ignored", job, facts, is_warning=True)


def report_turned_away(
    job: GenerationJob | QuickJob, error: WarrenError, metrics: JobMetrics, worker: str
) -> None:
    """Report a job that is answered with an error instead of being run."""
    metrics.turned_away.labels(metrics.model, error.code).inc()
    requests.write_line("job refused", job, {"worker": worker, "outcome": error.code})


def report_undecodable(
    message: Message, error: UndecodableMessage, metrics: JobMetrics, worker: str
) -> None:
    """Report a message that is dead-lettered because it is no job, or a job that may not be run."""
    metrics.dead_letters.labels(metrics.model, "undecodable").inc()
    facts = {
        "request_id": name_of(message),
        "user": message.user_id or None,
        "model": metrics.model,
        "worker": worker,
        "outcome": "dead_lettered",
        "reason": error.message,
    }
    requests.write_line("job dead-lettered", None, facts, is_warning=True)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
