"""Timestamps of a job's phases, recorded as trace spans."""

import time

from opentelemetry.trace import SpanKind

from shared import telemetry
from shared.messages import GenerationJob


class Timeline:
    """The timestamps of one job, as Unix times in seconds.

    Queue, prefill and decode are recorded as spans of the publisher's trace when they end.
    """

    def __init__(self, job: GenerationJob) -> None:
        self._context = telemetry.extract(job.trace)
        self._request_id = job.request_id
        self._last = time.time()
        self._has_token = False
        self._moved_at = time.monotonic()
        if job.created_at:
            self._record("worker.queue", min(job.created_at, self._last), self._last)

    @property
    def waits_s(self) -> float:
        """Seconds since the last token, or since the worker took the job."""
        return time.monotonic() - self._moved_at

    def submitted(self) -> None:
        self._last = time.time()

    def token(self) -> None:
        """Record the arrival of a token; the first one ends the prefill."""
        self._moved_at = time.monotonic()
        if not self._has_token:
            self._has_token = True
            self._end("worker.prefill")

    def ended(self) -> None:
        if self._has_token:
            self._end("worker.decode")

    def _end(self, name: str) -> None:
        now = time.time()
        self._record(name, self._last, now)
        self._last = now

    def _record(self, name: str, start_s: float, end_s: float) -> None:
        span = telemetry.tracer.start_span(
            name,
            context=self._context,
            kind=SpanKind.CONSUMER,
            attributes={"warren.request_id": self._request_id},
            start_time=int(start_s * 1e9),
        )
        span.end(end_time=int(end_s * 1e9))
