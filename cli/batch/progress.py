"""The progress of a batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias


def unanswered(num_failed: int, num_unexecuted: int, ending: str) -> str:
    """How many requests of a batch have no answer: the number of failed requests, and apart from it
    the number of requests that were not executed because the batch expired or was cancelled."""
    failed = f"{num_failed} failed"
    return f"{failed}, {num_unexecuted} {ending}" if num_unexecuted else failed


@dataclass(frozen=True, slots=True)
class BatchProgress:
    num_lines: int
    num_done: int
    """Lines with an answer, including failed lines and lines of earlier runs."""
    num_failed: int
    num_tokens: int
    """Tokens generated in this run."""
    tokens_per_s: float
    stage: str = ""
    """The current work, or the reason for waiting, before there are answers."""


OnProgress: TypeAlias = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class BatchSummary:
    num_lines: int
    num_failed: int
    num_tokens: int
    """Tokens generated in this run."""
    elapsed_s: float
    ending: str = "completed"
    """How the batch ended: completed, expired or cancelled."""
    num_unexecuted: int = 0
    """Requests that were not executed before the batch expired or was cancelled."""


@dataclass(slots=True)
class Pace:
    """Measures the throughput of this run."""

    num_tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def progress(self, num_lines: int, num_done: int, num_failed: int) -> BatchProgress:
        elapsed_s = self.elapsed_s
        return BatchProgress(
            num_lines=num_lines,
            num_done=num_done,
            num_failed=num_failed,
            num_tokens=self.num_tokens,
            tokens_per_s=self.num_tokens / elapsed_s if elapsed_s > 0 else 0.0,
        )
