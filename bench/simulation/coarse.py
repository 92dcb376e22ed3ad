"""A fleet whose workers are queueing servers with the step cost of real ones.

It leaves out: the windows of single workers, preemption, limits of the KV cache, prefix caches and
batch jobs. Free slots are given to workers in turn, and a job begins wherever there is one.
"""

from collections.abc import Sequence

import numpy as np

from bench.simulation.autoscaler import Demand
from bench.simulation.books import Books
from bench.simulation.queues import TenantQueues
from bench.simulation.servers import Ended, Servers
from bench.simulation.spec import Spec
from bench.simulation.traffic import Arrivals, Floats, Ints, Tenant
from gateway.fleet.live_workers import Backlog
from shared.bus.memory import MemoryBus
from shared.messages import Announcement

_MANY_IN_FLIGHT = 64
"""A tenant's requests from which on those that were set aside count for its estimated wait."""
_LOOK_S = 5.0
"""Seconds between two looks for running requests whose deadline has passed."""
_FLEET = "fleet"


class CoarseFleet:
    """See the module. ``num_workers`` are ready from the start."""

    def __init__(
        self, spec: Spec, tenants: Sequence[Tenant], num_workers: int, max_workers: int
    ) -> None:
        capacity = 2 * max_workers  # those that drain are there beside those that start
        self.books = Books(tenants)
        self.size = num_workers
        self._spec = spec
        self._now = 0.0
        self._servers = Servers(spec, capacity, len(tenants))
        self._queues = TenantQueues(tenants)
        self._handed_over: list[Arrivals] = []
        """Jobs that have begun, and continue before all others."""
        self._ready_at = np.full(capacity, np.inf)
        """When each pod takes jobs; infinite if there is no pod."""
        self._ready_at[:num_workers] = 0.0
        self._drained_at = np.full(capacity, np.inf)
        """When each worker hands over its sequences; infinite if it does not drain."""
        self._turn = 0
        self._backlog = Backlog(MemoryBus(), spec.max_queue_wait_s, lambda: self._now)
        self._next_announcement = self._next_look = 0.0

    @property
    def num_ready(self) -> int:
        return int(np.count_nonzero(self._takes_jobs()))

    @property
    def demand(self) -> Demand:
        waiting = self._num_waiting()
        held = min(waiting, self.num_ready * self._spec.max_waiting_jobs)
        running = int(self._servers.num_running.sum())
        return Demand(waiting - held, held, 0.0, running)

    @property
    def is_idle(self) -> bool:
        return not self.demand.total

    def resize(self, size: int) -> None:
        """Start pods, or stop the youngest ones."""
        pods = np.flatnonzero(np.isfinite(self._ready_at) & np.isinf(self._drained_at))
        if size > len(pods):
            free = np.flatnonzero(np.isinf(self._ready_at))[: size - len(pods)]
            self._ready_at[free] = self._now + self._spec.start_s
        else:
            youngest = np.argsort(-self._ready_at[pods], kind="stable")
            leaving = pods[youngest[: len(pods) - size]]
            self._drained_at[leaving] = self._now + self._spec.drain_grace_s
        self.size = size

    def advance(self, until: float, arrivals: Arrivals) -> None:
        """Simulate up to ``until``, with requests that arrive meanwhile."""
        now, dt = self._now, until - self._now
        books, servers = self.books, self._servers
        pods = np.isfinite(self._ready_at)
        top = int(np.flatnonzero(pods)[-1]) + 1 if pods.any() else 0
        books.worker_s += dt * np.count_nonzero(pods)
        is_ready = self._ready_at <= now
        books.ready_s += dt * np.count_nonzero(is_ready)
        ended = servers.advance(now, dt, top)
        self._account(ended)
        books.count(books.arrived, arrivals.tenant)
        self._queues.put(self._admitted(arrivals))
        too_old = until - self._spec.request_timeout_s
        books.late += self._queues.drop_older(too_old)
        if until >= self._next_look:
            self._next_look += _LOOK_S
            books.count(books.late, servers.drop_older(too_old))
        self._begin(ended, dt)
        books.sequence_s += dt * servers.num_running.sum()
        books.busy_s = servers.busy_s
        self._now = until
        self._stop_drained()
        self._announce()

    def _takes_jobs(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        takes: np.ndarray[tuple[int], np.dtype[np.bool_]] = (self._ready_at <= self._now) & (
            np.isinf(self._drained_at)
        )
        return takes

    def _num_waiting(self) -> int:
        return int(self._queues.depths.sum()) + sum(map(len, self._handed_over))

    def _account(self, ended: Ended) -> None:
        is_late = ended.at - ended.arrived_at > self._spec.request_timeout_s
        self.books.count(self.books.late, ended.tenant[is_late])
        self.books.count(self.books.answered, ended.tenant[~is_late])

    def _admitted(self, arrivals: Arrivals) -> Arrivals:
        """The requests that the gateways do not refuse."""
        num_ready = self.num_ready
        depths = self._queues.depths
        if not num_ready or not depths.any():
            return arrivals
        room = num_ready * self._spec.max_waiting_jobs
        num_aside = int(np.maximum(depths - room // 2, 0).sum())
        num_queued = max(0, int(depths.sum()) - num_aside - room)
        has_many = depths + self._servers.running_of >= _MANY_IN_FLIGHT
        waits_s = [
            self._backlog.wait_s(num_queued + many * num_aside, 0, [_FLEET]) for many in (0, 1)
        ]
        is_refused = np.take(waits_s, has_many.astype(int)) > self._spec.max_queue_wait_s
        refused = is_refused[arrivals.tenant]
        self.books.count(self.books.refused, arrivals.tenant[refused])
        return arrivals.part(~refused)

    def _begin(self, ended: Ended, dt: float) -> None:
        takes = self._takes_jobs()
        takes_again = takes[ended.worker]
        num_free = np.where(takes, self._spec.max_num_seqs - self._servers.num_running, 0)
        resumed, self._handed_over = self._handed_over, []
        room = int(num_free.sum())
        first = Arrivals.joined(resumed) if resumed else Arrivals.none()
        if len(first) > room:
            self._handed_over = [first.part(slice(room, None))]
            first = first.part(slice(room))
        jobs = self._queues.take(room - len(first), self._servers.running_of)
        waited_s = self._queues.waited_s(self._now + dt)
        self.books.contend(self._queues.served_cost, waited_s, dt)
        if not len(first) + len(jobs):
            return
        num_free -= np.bincount(ended.worker[takes_again], minlength=len(num_free))
        worker, free_at = self._places(
            len(first) + len(jobs), num_free, ended.worker[takes_again], ended.at[takes_again]
        )
        both = Arrivals(
            *(
                np.concatenate([getattr(first, name), getattr(jobs, name)])
                for name in ("at", "tenant", "prompt", "answer")
            )
        )
        first_at = self._servers.begin(both, worker, np.maximum(both.at, free_at))
        is_new = slice(len(first), None)
        self.books.first_tokens(both.tenant[is_new], first_at[is_new] - both.at[is_new])

    def _places(
        self, count: int, num_free: Ints, freed: Ints, freed_at: Floats
    ) -> tuple[Ints, Floats]:
        """So many slots, and when each is free: first those that were free before, of the workers
        in turn, then those that were freed meanwhile, in this order."""
        parts: list[Ints] = []
        left = count
        while left and len(order := np.flatnonzero(num_free > 0)):
            order = np.roll(order, -int(np.searchsorted(order, self._turn)))[:left]
            num_free[order] -= 1
            left -= len(order)
            self._turn = int(order[-1]) + 1
            parts.append(order)
        worker = np.concatenate([*parts, freed[:left]])
        free_at = np.full(count, self._now)
        free_at[count - left :] = freed_at[:left]
        return worker, free_at

    def _stop_drained(self) -> None:
        """Remove the workers that drain and are empty or have no time left."""
        draining = np.flatnonzero(np.isfinite(self._drained_at))
        is_over = self._drained_at[draining] <= self._now
        never_ready = self._ready_at[draining] > self._now
        is_empty = self._servers.num_running[draining] == 0
        for worker in draining[is_over | never_ready | is_empty]:
            left = self._servers.evict(int(worker))
            self.books.count(self.books.handed_over, left.tenant)
            if len(left):
                self._handed_over.append(left)
            self._ready_at[worker] = self._drained_at[worker] = np.inf

    def _announce(self) -> None:
        if self._now < self._next_announcement:
            return
        self._next_announcement += self._spec.announce_interval_s
        demand = self.demand
        self._backlog.hear(
            Announcement(
                worker=_FLEET,
                model="model",
                vocab_size=1,
                max_seq_len=1,
                fingerprint="",
                max_num_seqs=self.num_ready * self._spec.max_num_seqs,
                num_running=int(demand.warren_worker_sequences_running),
                num_waiting=int(demand.warren_worker_jobs_waiting),
                num_answered=int(self.books.answered.sum()),
            )
        )
