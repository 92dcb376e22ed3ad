"""Supervises the jobs that a worker runs: jobs without a reader, and batch jobs that starve."""

import asyncio
import math
import time
from contextlib import suppress

from shared.bus.base import Bus
from shared.errors import BusError, BusUnavailable, QueueDown
from shared.messages import Cancel
from shared.telemetry import incidents
from worker.jobs.consumer import HeldJob, HeldJobs, key_of
from worker.jobs.runner import JobRunner

_READER_CHECK_INTERVAL_S = 1.0
_MAX_LOOKS = 8
"""At logs at once, because a broker takes seconds to answer for a log whose node is silent."""
_PROMOTION_INTERVAL_S = 0.5
_DOWN_GRACE_S = 40.0
"""Seconds for which a job runs at least without a reader while its log's node is down: readers wait
30 s for the node."""


class Supervisor:
    """Cancels and promotes jobs; each method runs until it is cancelled."""

    def __init__(
        self, bus: Bus, held: HeldJobs, *, reader_grace_s: float, batch_patience_s: float
    ) -> None:
        """``reader_grace_s``: how long a job runs without a reader. ``batch_patience_s``: how long
        a batch job waits for a token before it is promoted."""
        self._bus = bus
        self._held = held
        self._reader_grace_s = reader_grace_s
        self._batch_patience_s = batch_patience_s
        self._looks = asyncio.Semaphore(_MAX_LOOKS)

    async def cancel_unread(self) -> None:
        """Cancel runs without a reader. Inspecting their logs renews the logs' expiry."""
        unread_since: dict[tuple[HeldJob, float], float] = {}
        while True:
            await asyncio.sleep(_READER_CHECK_INTERVAL_S)
            now = time.monotonic()
            grace_s = dict(await asyncio.gather(*map(self._look, self._held.values())))
            # A reader of a log that returns with its node needs the time to come back, too.
            unread_since = {
                (held, limit_s): unread_since.get((held, limit_s), now)
                for held, limit_s in grace_s.items()
                if limit_s < math.inf
            }
            for (held, limit_s), since in unread_since.items():
                if now - since >= limit_s:
                    await self._cancel(held)

    async def _cancel(self, held: HeldJob) -> None:
        """Cancel a run whose log has no reader, unless the log has a reader in another queue.
        Meanwhile the job may run here again, in a log that has a reader."""
        with suppress(BusUnavailable):
            is_elsewhere = await held.runner.find_log()
            if not is_elsewhere and self._held.get(key_of(held.job)) is held:
                self._held.obey(Cancel(request_id=held.job.request_id))

    async def _look(self, held: HeldJob) -> tuple[HeldJob, float]:
        async with self._looks:
            return held, await self._grace_s(held)

    async def _grace_s(self, held: HeldJob) -> float:
        """Seconds for which a run may continue, given its log; unlimited while it has a reader."""
        job = held.job
        if job.mode == "final":  # may be collected later, from any queue
            return math.inf
        facts = {"request_id": job.request_id}
        with incidents.survived("job", "log not inspected", **facts), suppress(BusError):
            grace_s = self._reader_grace_s
            try:
                log = await self._bus.inspect(held.runner.queue)
            except QueueDown:
                is_wanted = await held.runner.find_log() or job.is_detached
                grace_s = max(grace_s, _DOWN_GRACE_S)
            else:
                if log is None:
                    return 0
                is_wanted = log.num_consumers > 0 or job.is_detached
            return math.inf if is_wanted else grace_s
        return math.inf

    async def promote_batch(self) -> None:
        """Promote batch jobs that starve behind interactive jobs, one at a time, and all batch jobs
        that would otherwise miss their deadlines."""
        promoted: JobRunner | None = None
        while True:
            await asyncio.sleep(_PROMOTION_INTERVAL_S)
            running = [held.runner for held in self._held.values()]
            for runner in running:
                if runner.is_due:
                    runner.promote()
            if promoted not in running:
                promoted = max(running, key=lambda runner: runner.starves_s, default=None)
                if promoted is not None and promoted.starves_s >= self._batch_patience_s:
                    promoted.promote()
                else:
                    promoted = None
