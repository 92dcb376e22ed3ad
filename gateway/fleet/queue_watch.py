"""The queues of all known models, inspected periodically for metrics. Jobs that were published
without a gateway count, too."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.fleet.live_workers import LiveWorkers
from shared import topology
from shared.bus.base import Bus, QueueState
from shared.errors import BusError, QueueDown
from shared.topology import Lane

_LOOK_INTERVAL_S = 2.0


@dataclass(slots=True)
class QueueReading:
    """A queue, as it was inspected last."""

    num_waiting: int
    num_consumers: int
    since: float
    """No job that waits was created before this Unix time."""

    @property
    def oldest_age_s(self) -> float:
        """The age of the oldest waiting job, at most."""
        return max(0.0, time.time() - self.since) if self.num_waiting else 0.0


class QueueWatch:
    """Inspects the queues.

    The broker does not reveal the age of a queue's head. It is derived from two facts about a queue
    that is served in order: the head came after the queue was last empty, and after the newest job
    that a worker has taken from it. Before either is known, the age counts from the first look.
    """

    def __init__(self, bus: Bus, workers: LiveWorkers) -> None:
        self._bus = bus
        self._workers = workers
        self.readings: dict[tuple[str, Lane], QueueReading] = {}
        """The latest reading of each queue, by model and lane; empty while the broker is
        unreachable."""
        self.num_dead = 0
        """Messages in the queue of dead letters. A listing holds them for a moment, so a lower
        number counts once it was read twice."""
        self._num_dead_read = 0
        self._recalled: dict[str, float] = {}
        self._since: dict[tuple[str, Lane], float] = {}
        self._job_tokens: dict[str, float] = {}
        self._job_work_s: dict[str, float] = {}

    def num_tokens_waiting(self, model: str, lane: Lane) -> float:
        """An estimate: waiting jobs times the mean of the jobs answered recently."""
        return self.readings[model, lane].num_waiting * self._job_tokens.get(model, 0.0)

    def work_s_waiting(self, model: str, lane: Lane) -> float:
        """The same of the worker-seconds that the waiting jobs will take."""
        return self.readings[model, lane].num_waiting * self._job_work_s.get(model, 0.0)

    async def run(self) -> None:
        """Inspect the queues every few seconds, until cancelled."""
        while True:
            try:
                await self.look()
            except BusError:
                self.readings = {}
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def recall(self, seen: Mapping[str, float]) -> None:
        """From the next look on, watch the queues of these models, although no worker may be left
        to announce them. ``seen`` has the Unix time at which each model was last seen."""
        known = self._workers.known_models
        self._recalled |= {model: at for model, at in seen.items() if model not in known}

    async def look(self) -> None:
        """Inspect all queues once; a queue whose node is down has no reading. Raises `BusError`."""
        await self._look_for_recalled()
        known = self._workers.known_models
        models = sorted(known)
        if not models:  # the first worker declares the queues, and a broker logs each missing one
            return
        dead = await self._bus.inspect(topology.DEAD_LETTERS.name)
        num_dead = 0 if dead is None else dead.num_ready
        self.num_dead, self._num_dead_read = max(num_dead, self._num_dead_read), num_dead
        readings: dict[tuple[str, Lane], QueueReading] = {}
        for model in models:
            self._hear_workers(model)
            for lane in topology.LANES:
                try:
                    reading = await self._read(model, lane)
                except QueueDown:
                    continue
                if reading is None:  # an operator has deleted it
                    known.pop(model, None)
                    break
                if reading.num_waiting:
                    known[model] = time.time()
                readings[model, lane] = reading
        self.readings = readings

    async def _read(self, model: str, lane: Lane) -> QueueReading | None:
        """The reading of a lane, with the jobs that workers have set aside; None if its queue does
        not exist."""
        state = await self._bus.inspect(topology.jobs_queue(model, lane).name)
        if state is None:
            return None
        reading = self._reading(model, lane, state)
        if (overflow := topology.overflow_of(lane)) is None:
            return reading
        aside = await self._bus.inspect(topology.jobs_queue(model, overflow).name)
        if aside is not None:
            older = self._reading(model, overflow, aside)
            reading.num_waiting += older.num_waiting
            reading.since = min(reading.since, older.since)
        return reading

    async def _look_for_recalled(self) -> None:
        while self._recalled:
            model = next(iter(self._recalled))
            try:
                state = await self._bus.inspect(topology.jobs_queue(model, "interactive").name)
                exists = state is not None
            except QueueDown:  # its node may come back
                exists = True
            seen_at = self._recalled.pop(model)
            if exists:
                self._workers.known_models.setdefault(model, seen_at)

    def _hear_workers(self, model: str) -> None:
        for worker in self._workers.of_model(model):
            self._job_tokens[model] = worker.mean_job_tokens
            self._job_work_s[model] = worker.mean_job_work_s
            for job_class, taken_at in worker.newest_taken.items():
                known = self._since.get((model, job_class), 0.0)
                self._since[model, job_class] = max(known, taken_at)

    def _reading(self, model: str, lane: Lane, state: QueueState) -> QueueReading:
        now = time.time()
        since = now if not state.num_ready else self._since.get((model, lane), now)
        self._since[model, lane] = since
        return QueueReading(state.num_ready, state.num_consumers, since)
