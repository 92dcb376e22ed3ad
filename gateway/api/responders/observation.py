"""What is measured of one request: metrics and a log line for operators."""

import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from gateway.errors import status_of
from gateway.metrics import Metrics
from shared.errors import WarrenError
from shared.log import Relay
from shared.messages import Finished, GenerationJob, Started, TokenDelta

logger = logging.getLogger(__name__)

_TOKENS = (TokenDelta, Finished)
CLIENT_GONE = 499
"""nginx's status for a client that left; it is logged and never sent."""


class Observation:
    """Follows one request from admission to its end, which leaving the ``with`` records."""

    def __init__(self, metrics: Metrics, job: GenerationJob) -> None:
        self.status = 200
        self.error: WarrenError | None = None
        """What ended a stream whose status was already sent."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self._metrics = metrics
        self._job = job
        self._began_at = time.monotonic()
        self._last_token_at: dict[int, float] = {}
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

    def read(self, relays: Iterable[Relay]) -> None:
        """Count what the relay has just passed on."""
        now = time.monotonic()
        for relay in relays:
            event = relay.event
            if isinstance(event, _TOKENS):
                self._count_tokens(event, now)
            elif isinstance(event, Started):
                self._start(event)

    def client_left(self) -> None:
        self.status = CLIENT_GONE
        self._metrics.success.labels(self._job.model, "abort").inc()

    def failed(self, error: WarrenError) -> None:
        """The stream ends with ``error``."""
        self.error = error
        self._metrics.count_error(error.code)

    def _start(self, event: Started) -> None:
        self.num_prompt_tokens = sum(event.num_prompt_tokens)
        self._of_model.prompt_tokens.inc(self.num_prompt_tokens)
        self._in_state.dec()
        self._in_state = self._of_model.num_running
        self._in_state.inc()

    def _count_tokens(self, event: TokenDelta | Finished, now: float) -> None:
        if isinstance(event, Finished):
            self.num_cached_tokens += event.num_cached_tokens
            self._metrics.success.labels(self._job.model, event.finish_reason).inc()
        num_tokens = len(event.token_ids)
        if not num_tokens:
            return
        if not self.num_tokens:
            self._of_model.first_token_s.observe(now - self._began_at)
        if event.choice in self._last_token_at:
            self._of_model.token_s.observe((now - self._last_token_at[event.choice]) / num_tokens)
        self._last_token_at[event.choice] = now
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
