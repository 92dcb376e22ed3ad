"""The jobs of each tenant that wait in a coarse fleet, and which of them begin first."""

import heapq
from collections.abc import Sequence

import numpy as np

from bench.simulation.traffic import Arrivals, Floats, Ints, Tenant
from worker.engine.shares import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Shares


class TenantQueues:
    """Waiting jobs, by tenant in the order of their arrival.

    If not all can begin, the next job is that of the tenant with the lowest virtual token counter,
    as in an engine. A job is charged as a whole when it begins.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tenants
        self._shares = Shares({tenant.name: tenant.weight for tenant in tenants})
        self._jobs = [Arrivals.none() for _ in tenants]
        self._is_active = [False] * len(tenants)
        self.served_cost = np.zeros(len(tenants))
        """What each tenant was served by the last `take`."""

    @property
    def depths(self) -> Ints:
        """Waiting jobs of each tenant."""
        return np.array([len(jobs) for jobs in self._jobs])

    def waited_s(self, now: float) -> Floats:
        """How long the oldest job of each tenant has waited."""
        return np.array([max(0.0, now - jobs.at[0]) if len(jobs) else 0.0 for jobs in self._jobs])

    def put(self, arrivals: Arrivals) -> None:
        for tenant in np.flatnonzero(np.bincount(arrivals.tenant)).tolist():
            own = arrivals.part(arrivals.tenant == tenant)
            waiting = self._jobs[tenant]
            self._jobs[tenant] = Arrivals.joined([waiting, own]) if len(waiting) else own

    def drop_older(self, at: float) -> Ints:
        """Remove the jobs that arrived before ``at``; returns how many of each tenant."""
        counts = np.array([np.searchsorted(jobs.at, at) for jobs in self._jobs])
        for tenant in np.flatnonzero(counts).tolist():
            self._pop(tenant, int(counts[tenant]))
        return counts

    def take(self, count: int, num_running: Ints) -> Arrivals:
        """Remove up to ``count`` jobs, in the order in which they begin. ``num_running``:
        sequences of each tenant that run."""
        self._note_active(num_running)
        self.served_cost[:] = 0.0
        if count >= sum(map(len, self._jobs)):
            taken = [self._pop(tenant, len(jobs)) for tenant, jobs in enumerate(self._jobs)]
            jobs = Arrivals.joined(taken)
            costs = _costs(jobs)
        else:
            jobs, costs = self._next(count)
        if len(jobs):
            self.served_cost += np.bincount(jobs.tenant, costs, len(self._tenants))
        for tenant in np.flatnonzero(self.served_cost).tolist():
            self._shares.charge(self._tenants[tenant].name, float(self.served_cost[tenant]))
        return jobs

    def _note_active(self, num_running: Ints) -> None:
        """A tenant without jobs loses its place, and with it what it is owed."""
        for index, tenant in enumerate(self._tenants):
            is_active = bool(len(self._jobs[index]) or num_running[index])
            if is_active and not self._is_active[index]:
                self._shares.enter(tenant.name)
            elif self._is_active[index] and not is_active:
                self._shares.leave(tenant.name)
            self._is_active[index] = is_active

    def _next(self, count: int) -> tuple[Arrivals, Floats]:
        """The next ``count`` jobs, of which there are more, and their costs."""
        costs = [_costs(jobs.part(slice(count))).tolist() for jobs in self._jobs]
        num_taken = [0] * len(costs)
        order: list[int] = []
        heap = [
            (self._shares.counter(self._tenants[index].name), index)
            for index, own in enumerate(costs)
            if own
        ]
        heapq.heapify(heap)
        while heap and len(order) < count:
            counter, index = heap[0]
            order.append(index)
            cost = costs[index][num_taken[index]]
            num_taken[index] += 1
            if num_taken[index] < len(costs[index]):
                heapq.heapreplace(heap, (counter + cost / self._tenants[index].weight, index))
            else:
                heapq.heappop(heap)
        parts = [self._pop(index, taken) for index, taken in enumerate(num_taken)]
        places = np.argsort(np.argsort(order, kind="stable"), kind="stable")
        joined = Arrivals(
            *(
                np.concatenate([getattr(part, name) for part in parts])[places]
                for name in ("at", "tenant", "prompt", "answer")
            )
        )
        return joined, _costs(joined)

    def _pop(self, tenant: int, count: int) -> Arrivals:
        jobs = self._jobs[tenant]
        self._jobs[tenant] = jobs.part(slice(count, None))
        return jobs.part(slice(count))


def _costs(jobs: Arrivals) -> Floats:
    costs: Floats = PROMPT_TOKEN_COST * jobs.prompt + OUTPUT_TOKEN_COST * jobs.answer
    return costs
