"""The live workers, the estimated wait for them, and the publishing of jobs to their queues.

The state of workers is derived from announcements and from the queues at the broker. The wait for a
new request is estimated as the queue depth divided by the workers' throughput. A worker's
throughput is measured only while all its sequence slots are in use; otherwise it reflects demand
rather than capacity.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import Counter

from gateway.fleet import affinity
from gateway.fleet.affinity import Candidate, num_used
from gateway.fleet.clocks import MAX_SKEW_S, WorkerClocks
from gateway.fleet.publishing import JobPublisher, job_message
from shared import topology
from shared.bus.base import Bus
from shared.errors import (
    BusError,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    Unavailable,
    Unroutable,
)
from shared.messages import Announcement, GenerationJob, JobClass, seconds_left
from shared.telemetry import incidents
from shared.telemetry.metrics import Catalog

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.1
STALE_AFTER_S = 1.0
"""Seconds for which the number of waiting jobs counts after it was looked up."""
_HALF_LIFE_S = 30.0
_LOAD_HALF_LIFE_S = 20.0
_MAX_RETRY_AFTER_S = 60.0
_FORGET_RATE_AFTER_S = 60.0
_FORGET_HEARTBEAT_AFTER_S = 120.0
HEARD_WITHIN_S = 1.5 * topology.ANNOUNCE_INTERVAL_S
"""Seconds after its start within which a gateway receives an announcement of every live worker."""
_MANY_IN_FLIGHT = 64
"""With more requests of a tenant in flight, workers may have set some of them aside."""


@dataclass(slots=True)
class _Rate:
    """The throughput of a worker while it was busy, with exponential decay."""

    last: Announcement
    heard_at: float
    num_answered: float = 0.0
    busy_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        return _is_busy(self.last)

    def hear(self, announcement: Announcement, now: float) -> None:
        num_answered = announcement.num_answered - self.last.num_answered
        if self.is_busy and _is_busy(announcement) and num_answered >= 0:
            elapsed_s = now - self.heard_at
            decay = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self.num_answered = self.num_answered * decay + num_answered
            self.busy_s = self.busy_s * decay + elapsed_s
        self.last, self.heard_at = announcement, now


@dataclass(slots=True)
class _Depth:
    """The measured depth of a model's queues, and the jobs admitted since."""

    num_waiting: int = 0
    num_set_aside: int = 0
    counted_at: float = -math.inf
    num_admitted: int = 0
    looking: "asyncio.Task[None] | None" = None


class Backlog:
    """Rejects requests that would wait too long. It adds no latency: the depth is measured in the
    background, and only while there are requests."""

    def __init__(
        self,
        bus: Bus,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        """``clock`` returns the time in seconds."""
        self._stale_after_s = stale_after_s
        self._bus = bus
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._rates: dict[str, _Rate] = {}
        self._depths: dict[str, _Depth] = {}

    def hear(self, announcement: Announcement) -> None:
        """Record the progress of a worker."""
        now = self._clock()
        known = self._rates.get(announcement.worker)
        if announcement.is_leaving:
            self._rates.pop(announcement.worker, None)
        elif known is None:
            self._forget(now)
            self._rates[announcement.worker] = _Rate(announcement, now)
        else:
            known.hear(announcement, now)

    def _forget(self, now: float) -> None:
        """Forget workers that died without a final announcement."""
        for worker, rate in list(self._rates.items()):
            if now - rate.heard_at > _FORGET_RATE_AFTER_S:
                del self._rates[worker]

    def require_short_wait(
        self, model: str, workers: Iterable[str], num_in_flight: int = 0
    ) -> None:
        """Count a request for ``model``, which ``workers`` serve, of a tenant that has
        ``num_in_flight`` here. Raises `Overloaded` with the time after which it would be accepted.

        Workers set aside jobs of tenants that have many jobs, so only requests of such tenants wait
        for these jobs.
        """
        now = self._clock()
        depth = self._depths.setdefault(model, _Depth())
        if now - depth.counted_at > _LOOK_INTERVAL_S and depth.looking is None:
            depth.looking = asyncio.create_task(self._look(model, depth))
        if now - depth.counted_at < self._stale_after_s:
            num_waiting = depth.num_waiting
            if num_in_flight >= _MANY_IN_FLIGHT:
                num_waiting += depth.num_set_aside
            wait_s = self.wait_s(num_waiting, depth.num_admitted, workers)
            if wait_s > self._max_wait_s:
                retry_after_s = min(max(wait_s - self._max_wait_s, 1.0), _MAX_RETRY_AFTER_S)
                raise Overloaded(
                    "Too many requests are waiting for this model.",
                    retry_after_s=retry_after_s,
                    limit="max_queue_wait_s",
                )
        depth.num_admitted += 1

    def wait_s(self, num_counted: int, num_admitted: int, workers: Iterable[str]) -> float:
        """The estimated wait for the queue; 0 if a worker has free slots."""
        num_waiting = num_counted + num_admitted
        if not num_counted:
            return 0.0
        rates = [self._rates.get(worker) for worker in workers]
        known = [rate for rate in rates if rate is not None and rate.is_busy and rate.busy_s > 0]
        if len(known) < len(rates):
            return 0.0
        per_s = sum(rate.num_answered / rate.busy_s for rate in known)
        if per_s:
            return num_waiting / per_s
        # No answers so far: the wait is at least as long as the workers have been busy.
        return min(rate.busy_s for rate in known)

    async def _look(self, model: str, depth: _Depth) -> None:
        num_before = depth.num_admitted
        try:
            with suppress(BusError):
                state = await self._bus.inspect(topology.jobs_queue(model, "interactive").name)
                depth.num_waiting = state.num_ready if state is not None else 0
                aside = await self._bus.inspect(topology.jobs_queue(model, "overflow").name)
                depth.num_set_aside = aside.num_ready if aside is not None else 0
                depth.num_admitted -= num_before
                depth.counted_at = self._clock()
        except Exception as error:  # noqa: BLE001 (requests are admitted without it)
            incidents.report("task", "queue not inspected", error, model=model)
        finally:
            depth.looking = None


def _is_busy(announcement: Announcement) -> bool:
    return num_used(announcement) >= announcement.max_num_seqs


@dataclass(slots=True)
class _Known:
    announcement: Announcement
    seen_at: float
    mean_used: float
    """The slots that it has used, with exponential decay."""

    def heard(self, announcement: Announcement, now: float) -> "_Known":
        decay = 0.5 ** ((now - self.seen_at) / _LOAD_HALF_LIFE_S)
        mean_used = self.mean_used * decay + num_used(announcement) * (1 - decay)
        return _Known(announcement, now, mean_used)


@dataclass(slots=True)
class LiveWorkers:
    """Workers with a recent announcement, by address, and the publishing of generations to them."""

    bus: Bus
    backlog: Backlog
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    catalog: Catalog = field(default_factory=Catalog)
    """The metrics to which a counter is added."""
    has_affinity: bool = False
    """Whether a job may go to the queue of the worker that may have its prefix in its cache."""
    requires_worker: bool = False
    """Whether requests that may not wait are refused while no worker of their model lives."""
    heard_within_s: float = HEARD_WITHIN_S
    """Seconds after its start within which this gateway hears of every live worker."""
    _workers: dict[str, _Known] = field(default_factory=dict)
    _leaving: dict[str, _Known] = field(default_factory=dict)
    """Workers that take no more jobs."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    """Includes workers that are shutting down, whose streams continue for a while."""
    _first_seen_at: dict[str, int] = field(default_factory=dict)
    _last_of_model: dict[str, Announcement] = field(default_factory=dict)
    """Each model's latest announcement, which holds for its next worker too."""
    _missed: set[str] = field(default_factory=set)
    """Models without a live worker, for which jobs were published since."""
    _began_at: float = field(init=False)
    known_models: dict[str, float] = field(default_factory=dict)
    """The models whose queues are known to exist, with or without a live worker, and the Unix time
    at which each was last seen: announced, requested, or with a job in a queue."""
    jobs: JobPublisher = field(init=False)
    """Publishes to the queues that all workers of a model share."""
    clocks: WorkerClocks = field(default_factory=WorkerClocks)
    _published: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = JobPublisher(self.bus, self._addresses_of, self.clocks)
        self._began_at = self.clock()
        self._published = self.catalog.counter(
            "warren_gateway_jobs_published_total",
            "Generations published, by route: near (to the worker that may have their prefix in "
            "its cache) or shared (to the queue that all workers of the model share).",
            "model",
            "route",
        )

    def hear(self, announcement: Announcement) -> None:
        now = self.clock()
        if announcement.worker not in self._heard_at:
            self._forget()
        self._heard_at[announcement.worker] = now
        before = self._workers.get(announcement.worker)
        known = (
            _Known(announcement, now, num_used(announcement))
            if before is None
            else before.heard(announcement, now)
        )
        if announcement.is_leaving:
            self._workers.pop(announcement.worker, None)
            self._leaving[announcement.worker] = known
        else:
            self._workers[announcement.worker] = known
            self._missed.discard(announcement.model)
            self.known_models[announcement.model] = time.time()
            self._last_of_model[announcement.model] = announcement
            self._first_seen_at.setdefault(announcement.model, int(time.time()))
        self.backlog.hear(announcement)
        self.clocks.hear(announcement)

    def of_model(self, model: str) -> list[Announcement]:
        """The latest announcement of each live worker of a model."""
        return [one.worker for one in self.candidates(model)]

    def _addresses_of(self, model: str) -> list[str]:
        return [worker.worker for worker in self.of_model(model)]

    def candidates(self, model: str) -> list[Candidate]:
        """Each live worker of a model."""
        oldest = self.clock() - topology.FORGET_AFTER_S
        return [
            Candidate(known.announcement, known.mean_used)
            for known in self._workers.values()
            if known.announcement.model == model and known.seen_at > oldest
        ]

    async def find(self, model: str, *, may_wait: bool = True) -> Announcement | None:
        """The announcement of a model's live worker, or of its last worker while its queue waits
        for another: all workers of a model agree on it. None if this gateway has heard no worker of
        a model whose queue exists.

        Raises `ModelNotFound` and `BusUnavailable`, and `Unavailable` if the request should not
        wait for a worker (``may_wait``) and this gateway requires one.
        """
        if workers := self.of_model(model):
            return workers[0]
        queue = topology.jobs_queue(model, "interactive")
        if await self.bus.inspect(queue.name) is None:
            raise ModelNotFound(f"The model '{model}' does not exist.", param="model")
        self.known_models[model] = time.time()
        if self.requires_worker and not may_wait and not self._is_early:
            raise Unavailable(f"No worker serves the model '{model}' at present.")
        return self._last_of_model.get(model)

    def forget_model(self, model: str) -> None:
        """Forget a model whose queues are deleted."""
        self.known_models.pop(model, None)
        self._last_of_model.pop(model, None)

    def require_short_wait(self, model: str, num_in_flight: int = 0) -> None:
        """Raises `Overloaded` if the queues of all live workers of a model are too long for a
        tenant with so many requests in flight."""
        if workers := self.of_model(model):
            self.backlog.require_short_wait(
                model, [worker.worker for worker in workers], num_in_flight
            )

    async def publish(
        self, job: GenerationJob, reply_key: str, job_class: JobClass = "interactive"
    ) -> None:
        """Publish a generation: to the queue of the worker that may have its prefix in its cache,
        or to the queue that all workers share.

        Raises the same errors as `JobPublisher.publish`.
        """
        near, shared = (self._published.labels(job.model, route) for route in ("near", "shared"))
        target = self._affinity_target(job) if job_class == "interactive" else None
        if target is not None and await self.publish_near(job, reply_key, target.worker):
            near.inc()
        else:
            await self.jobs.publish(job, reply_key, job_class)
            shared.inc()
            self._miss(job)

    def models(self) -> dict[str, list[Announcement]]:
        """The latest announcement of each live worker, by model."""
        self._forget()
        models: dict[str, list[Announcement]] = {}
        for known in self._workers.values():
            models.setdefault(known.announcement.model, []).append(known.announcement)
        return models

    def clock_skew_s(self, model: str) -> float:
        """The largest difference between the clock of a live worker and this gateway's."""
        return max((abs(self.clocks.ahead_s(a)) for a in self._addresses_of(model)), default=0.0)

    def problems(self) -> list[str]:
        """The problems that keep requests for single models from being answered, as sentences."""
        problems = self.jobs.problems()
        for model in sorted(self.models()):
            skew_s = self.clock_skew_s(model)
            if skew_s > MAX_SKEW_S:
                problems.append(
                    f"The clock of a worker of the model '{model}' differs by {skew_s:.0f} s."
                )
        return problems

    def announced(self) -> list[tuple[Announcement, float]]:
        """The latest announcement of each worker, including workers that are leaving, and the
        seconds since it arrived."""
        self._forget()
        now = self.clock()
        known = [*self._workers.values(), *self._leaving.values()]
        return [(one.announcement, now - one.seen_at) for one in known]

    def only_model(self) -> str:
        """The model of a request that names no model. Raises `InvalidRequest` unless there is
        exactly one model."""
        models = list(self.models())
        if len(models) != 1:
            raise InvalidRequest("model: expected the name of a model.", param="model")
        return models[0]

    def first_seen_at(self, model: str) -> int:
        """Unix time of the model's first announcement."""
        return self._first_seen_at[model]

    def heard_at(self, worker: str) -> float:
        """Monotonic time of a worker's last heartbeat; 0 if there was none."""
        return self._heard_at.get(worker, 0.0)

    def _miss(self, job: GenerationJob) -> None:
        """Warn, once until there is a worker, that a job was published for a model without a live
        worker."""
        if self._is_early or job.model in self._missed or self.of_model(job.model):
            return
        self._missed.add(job.model)
        left_s = seconds_left(job)
        fields = {"model": job.model, "deadline_s": None if left_s is None else round(left_s)}
        logger.warning("no live worker; requests wait until their deadlines", extra=fields)

    @property
    def _is_early(self) -> bool:
        """Whether there may be workers that this gateway has not heard yet."""
        return self.clock() < self._began_at + self.heard_within_s

    def _affinity_target(self, job: GenerationJob) -> Announcement | None:
        """The worker to prefer. None for a job that is published again, because it may have been
        lost with that worker."""
        if not self.has_affinity or job.publication:
            return None
        candidates = self.candidates(job.model)
        if len(candidates) < 2:
            return None
        root = affinity.root_of(job)
        return None if root is None else affinity.target_of(root, candidates)

    async def publish_near(self, job: GenerationJob, reply_key: str, address: str) -> bool:
        """Publish to the queue of a worker; False if it is gone or full. Raises `BusError`."""
        message = job_message(job, reply_key, self.clocks.shift_s([address]))
        with suppress(Unroutable, PublishRefused, MessageTooLarge):
            await self.bus.publish(topology.near_binding(job.model, address), message)
            return True
        return False

    def _forget(self) -> None:
        now = self.clock()
        oldest = now - topology.FORGET_AFTER_S
        self._workers = {a: known for a, known in self._workers.items() if known.seen_at > oldest}
        self._leaving = {a: known for a, known in self._leaving.items() if known.seen_at > oldest}
        self.clocks.forget_all_but(self._workers)
        if len(self._heard_at) > 2 * len(self._workers) + 16:
            oldest = now - _FORGET_HEARTBEAT_AFTER_S
            self._heard_at = {a: at for a, at in self._heard_at.items() if at > oldest}
