"""Measures a request: metrics, and log lines for operators."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gateway.errors import ACCEPTED, SERVICE_FAILURES, status_of
from gateway.log.cursor import Item, Restarted
from gateway.log.relay import LogRelay
from gateway.log.visiting import LogObserver
from gateway.metrics import Metrics
from shared.errors import Cancelled, WarrenError
from shared.messages import Finished, GenerationJob, JobClass, Started, TokenDelta
from shared.telemetry import requests

CLIENT_GONE = 499
"""nginx's status for a client that disconnected. It is logged and never sent."""


@dataclass(slots=True)
class _Seen:
    """The counts of a choice."""

    num_tokens: int = 0
    is_finished: bool = False
    last_at: float | None = None
    """Monotonic time of the last token."""


class Observation(LogObserver):
    """Follows a request to its end, which leaving the ``with`` records. A request that raises
    before it was accepted is reported where its error is answered: `gateway.errors`."""

    def __init__(
        self,
        metrics: Metrics,
        job: GenerationJob,
        job_class: JobClass,
        state: MutableMapping[str, Any],
    ) -> None:
        """``state`` is the state of the HTTP request."""
        self.status = 200
        self.error: WarrenError | None = None
        """The error that ended the request, possibly after its status was sent."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self._metrics = metrics
        self._job = job
        self._class: JobClass = job_class
        self._state = state
        self._relay: LogRelay | None = None
        """Set once the request is accepted."""
        self._began_at = time.monotonic()
        self._arrived_at = self._began_at
        """Monotonic time at which the last events have arrived."""
        self._first_token_s: float | None = None
        self._has_started = False
        self._taken_over: set[str] = set()
        """The tickets of the runs that were replaced."""
        self._seen: defaultdict[int, _Seen] = defaultdict(_Seen)
        """The counts of each choice, by its number."""
        self._of_class = metrics.of_class(job.model, job_class)
        self._tenant = metrics.tenant_label(job.tenant)
        self._tokens = metrics.tokens_of(job.model, job_class, self._tenant)
        self._in_state = self._of_class.num_waiting

    def __enter__(self) -> Self:
        self._usage = self._metrics.tenant_usage.begin(
            self._job.tenant, is_interactive=self._class == "interactive"
        )
        self._in_state.inc()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in_state.dec()
        self._usage.num_in_flight -= 1
        self._usage.num_interactive -= self._class == "interactive"
        ended_by = error
        if isinstance(error, asyncio.CancelledError):  # such as a request of a batch that ends
            ended_by = self.error or Cancelled("The request was cancelled.")
        if isinstance(ended_by, WarrenError):
            self.status, self.error = status_of(ended_by).code, ended_by
        elif error is not None:
            self.status = 500
        if isinstance(self.error, Cancelled):
            self._usage.num_cancelled += 1
        else:
            self._usage.num_failed += self.error is not None or self.status >= 500
        self._usage.num_prompt_tokens += self.num_prompt_tokens
        self._usage.num_cached_tokens += self.num_cached_tokens
        self._usage.num_generated_tokens += self.num_tokens
        if self._relay is not None or not isinstance(error, WarrenError):
            self._end()

    @property
    def total_tokens(self) -> int:
        """The tokens of prompts and answers so far, which are what a key's limits count."""
        return self.num_prompt_tokens + self.num_tokens

    def accepted(self, relay: LogRelay) -> None:
        """The job was published, or the log of an earlier job with the same Idempotency-Key is
        relayed."""
        self._relay = relay
        self._state[ACCEPTED] = True
        fields = {"repeats_earlier": True} if relay.repeats_earlier else {}
        requests.write_line("request accepted", self._job, fields)

    def note_arrival(self) -> None:
        """Note that the events that are read next have just arrived."""
        self._arrived_at = time.monotonic()

    def read_all(self, items: Iterable[Item]) -> None:
        """Count events that have just arrived. Repeated tokens are not counted again."""
        self.note_arrival()
        for item in items:
            if not isinstance(item, Restarted):
                self.read(item)

    def client_left(self) -> None:
        self.status = CLIENT_GONE

    def failed(self, error: WarrenError) -> None:
        """The stream ends with ``error``."""
        self.error = error
        self._metrics.count_error(error.code)

    def on_start(self, event: Started) -> None:
        if not self._has_started:
            self._has_started = True
            self.num_prompt_tokens = sum(event.num_prompt_tokens)
            self._tokens.prompt.inc(self.num_prompt_tokens)
            self._in_state.dec()
            self._in_state = self._of_class.num_running
            self._in_state.inc()
        replaced = None if self._relay is None else self._relay.cursor.reader.replaced
        if replaced is None or replaced.ticket in self._taken_over:
            return
        self._taken_over.add(replaced.ticket)
        reason = replaced.reason.replace(" ", "_")
        self._metrics.takeovers.labels(self._job.model, reason).inc()
        fields: dict[str, object] = {
            "from_worker": replaced.worker,
            "at_token": self.num_tokens,
            "reason": replaced.reason,
        }
        self._write("request taken over", fields, is_warning=not replaced.is_planned)

    def on_finish(self, event: Finished) -> None:
        seen = self._seen[event.choice]
        if not seen.is_finished:
            seen.is_finished = True
            self.num_cached_tokens += event.num_cached_tokens
            self._tokens.cached.inc(event.num_cached_tokens)
            self._metrics.finished.labels(self._job.model, event.finish_reason).inc()
        self._count_tokens(event)

    def on_tokens(self, event: TokenDelta) -> None:
        self._count_tokens(event)

    def _count_tokens(self, event: TokenDelta | Finished) -> None:
        seen, now = self._seen[event.choice], self._arrived_at
        num_tokens = event.index + len(event.token_ids) - seen.num_tokens
        if num_tokens <= 0:
            return
        seen.num_tokens += num_tokens
        if not self.num_tokens:
            self._first_token_s = now - self._began_at
            self._of_class.first_token_s.observe(self._first_token_s)
        if seen.last_at is not None:
            self._of_class.token_s.observe((now - seen.last_at) / num_tokens)
        seen.last_at = now
        self.num_tokens += num_tokens
        self._tokens.completion.inc(num_tokens)

    def _end(self) -> None:
        duration_s = time.monotonic() - self._began_at
        code = self._outcome
        self._of_class.request_s.observe(duration_s)
        labels = (self._job.model, self._class, self._tenant, code or "completed")
        self._metrics.requests.labels(*labels).inc()
        self._metrics.gen_ai.record(
            self._job.request_id,
            self._job.model,
            duration_s=duration_s,
            first_token_s=self._first_token_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            error_code=code,
        )
        first_s = self._first_token_s
        fields: dict[str, object] = {
            "status": self.status,
            "code": code,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": self.num_tokens,
            "first_token_s": None if first_s is None else round(first_s, 4),
            "duration_s": round(duration_s, 4),
        }
        # A stream has failed if it ends with an error, although its status was sent before.
        status = self.status if self.error is None else status_of(self.error).code
        self._write("request ended", fields, is_warning=status in SERVICE_FAILURES)

    @property
    def _outcome(self) -> str | None:
        """None for a request that was answered; otherwise the code of the error, or that the client
        left."""
        if self.error is not None:
            return self.error.code
        if self.status == CLIENT_GONE:
            return "client_gone"
        return None if self.status < 500 else "internal_error"

    def _write(
        self, step: requests.Step, fields: dict[str, object], *, is_warning: bool = False
    ) -> None:
        reader = None if self._relay is None else self._relay.cursor.reader
        if reader is not None:
            fields = {"worker": reader.worker, "attempt": reader.attempt or None, **fields}
        requests.write_line(step, self._job, fields, is_warning=is_warning)
