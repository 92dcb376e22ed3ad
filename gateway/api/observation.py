"""Measures one request: metrics, and a log line for operators."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.errors import status_of
from gateway.log.cursor import Item
from gateway.metrics import Metrics
from shared.errors import WarrenError
from shared.messages import Finished, GenerationJob, Started, TokenDelta

logger = logging.getLogger(__name__)

_TOKENS = (TokenDelta, Finished)
CLIENT_GONE = 499
"""nginx's status for a client that disconnected. It is logged and never sent."""


@dataclass(slots=True)
class _Seen:
    """The counts of one choice."""

    num_tokens: int = 0
    is_finished: bool = False
    last_at: float | None = None
    """Monotonic time of the last token."""


class Observation:
    """Follows one request from admission to its end, which leaving the ``with`` records."""

    def __init__(self, metrics: Metrics, job: GenerationJob) -> None:
        self.status = 200
        self.error: WarrenError | None = None
        """The error that ended the request, possibly after its status was sent."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self._metrics = metrics
        self._job = job
        self._began_at = time.monotonic()
        self._has_started = False
        self._seen: defaultdict[int, _Seen] = defaultdict(_Seen)
        """By choice."""
        self._of_model = metrics.of_model(job.model)
        self._in_state = self._of_model.num_waiting

    def __enter__(self) -> Self:
        self._in_state.inc()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in_state.dec()
        if isinstance(error, WarrenError):
            self.status, self.error = status_of(error).code, error
        elif error is not None:
            self.status = 500
        duration_s = time.monotonic() - self._began_at
        self._of_model.request_s.observe(duration_s)
        logger.info("request ended", extra=self._facts(duration_s))

    def read(self, items: Iterable[Item]) -> None:
        """Count the events that were just read. Repeated tokens are not counted again."""
        now = time.monotonic()
        for item in items:
            if isinstance(item, _TOKENS):
                self._count_tokens(item, now)
            elif isinstance(item, Started) and not self._has_started:
                self._start(item)

    def client_left(self) -> None:
        self.status = CLIENT_GONE
        self._metrics.success.labels(self._job.model, "abort").inc()

    def failed(self, error: WarrenError) -> None:
        """The stream ends with ``error``."""
        self.error = error
        self._metrics.count_error(error.code)

    def _start(self, event: Started) -> None:
        self._has_started = True
        self.num_prompt_tokens = sum(event.num_prompt_tokens)
        self._of_model.prompt_tokens.inc(self.num_prompt_tokens)
        self._in_state.dec()
        self._in_state = self._of_model.num_running
        self._in_state.inc()

    def _count_tokens(self, event: TokenDelta | Finished, now: float) -> None:
        seen = self._seen[event.choice]
        if isinstance(event, Finished) and not seen.is_finished:
            seen.is_finished = True
            self.num_cached_tokens += event.num_cached_tokens
            self._metrics.success.labels(self._job.model, event.finish_reason).inc()
        num_tokens = event.index + len(event.token_ids) - seen.num_tokens
        if num_tokens <= 0:
            return
        seen.num_tokens += num_tokens
        if not self.num_tokens:
            self._of_model.first_token_s.observe(now - self._began_at)
        if seen.last_at is not None:
            self._of_model.token_s.observe((now - seen.last_at) / num_tokens)
        seen.last_at = now
        self.num_tokens += num_tokens
        self._of_model.generation_tokens.inc(num_tokens)

    def _facts(self, duration_s: float) -> dict[str, object]:
        return {
            "request_id": self._job.request_id,
            "model": self._job.model,
            "status": self.status,
            "code": self.error.code if self.error is not None else None,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": self.num_tokens,
            "duration_s": round(duration_s, 4),
        }
