"""Whether a batch is late: at its present rate it would not end within its window."""

import time

from gateway.store.batches import BatchRecord
from shared.messages import JobClass

_LAST_PART = 0.1
"""The part of the window, at its end, in which a batch may be late. Before, its rate may still
change: a batch has the capacity that interactive requests leave free."""


class Closing:
    """The run of a batch, and the class in which its next lines run."""

    def __init__(self, batch: BatchRecord, now: float | None = None) -> None:
        """``now`` is the beginning of the run, a Unix time."""
        self.num_left = self.num_answered = 0
        """Lines that have no answer, and lines that were answered in this run."""
        self._began_at = time.time() if now is None else now
        self._ends_at = float(batch.expires_at)
        window_s = batch.expires_at - batch.created_at
        self._closes_at = self._ends_at - _LAST_PART * window_s

    def answered(self) -> None:
        """A line was answered."""
        self.num_left -= 1
        self.num_answered += 1

    def job_class(self, now: float | None = None) -> JobClass:
        """The class of the next line: interactive if the batch is late. ``now`` is a Unix time."""
        now = time.time() if now is None else now
        if now < self._closes_at:
            return "batch"
        expected = self.num_answered * (self._ends_at - now) / max(now - self._began_at, 1e-3)
        return "interactive" if self.num_left > expected else "batch"
