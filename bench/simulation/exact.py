"""A fleet of the product's own parts on an event loop with virtual time.

Every worker has a real `Engine` with its scheduler, shares and block pool on a device whose steps
take the time of the cost model, and a real `JobWindow`. Jobs go through the in-memory broker, in
the queues of `shared.topology`. A real `Backlog` admits them, and a real `LiveWorkers` chooses the
worker for a conversation. Written for the simulation are the shells around these: what
`worker.jobs.consumer`, `worker.process.service` and a gateway do.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self

import numpy as np

from bench.simulation.autoscaler import Demand
from bench.simulation.books import Books
from bench.simulation.exact_worker import MODEL, ExactWorker, Request, job_of
from bench.simulation.spec import Spec
from bench.simulation.traffic import Arrivals, Tenant
from bench.simulation.virtual_time import VirtualTimeLoop
from gateway.fleet.live_workers import Backlog, LiveWorkers
from shared import topology
from shared.bus.memory import MemoryBus
from shared.errors import Overloaded
from worker.engine.shares import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST


class ExactFleet:
    """See the module. ``num_workers`` are ready from the start. ``with`` ends its tasks."""

    def __init__(self, spec: Spec, tenants: Sequence[Tenant], num_workers: int) -> None:
        self.books = Books(tenants)
        self.size = num_workers
        self._spec = spec
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self._loop = self._runner.get_loop()
        self._numbers = count(1)
        self._rng = np.random.default_rng(len(tenants))
        """For what happens after answers, which come in the same order each time."""
        self._workers: list[ExactWorker] = []
        """In the order of their start; those that drain are among them."""
        self._starting: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[str, Request] = {}
        self._cost = np.zeros(len(tenants))
        """What each tenant was served since the last interval."""
        self._runner.run(self._open(num_workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.close()

    @property
    def num_ready(self) -> int:
        return sum(not worker.is_draining for worker in self._workers)

    @property
    def demand(self) -> Demand:
        return self._runner.run(self._demand())

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def advance(self, until: float, arrivals: Arrivals) -> None:
        """Simulate up to ``until``, with requests that arrive meanwhile."""
        names = self.books.tenants
        for at, tenant, prompt, answer in zip(
            arrivals.at.tolist(),
            arrivals.tenant.tolist(),
            arrivals.prompt.tolist(),
            arrivals.answer.tolist(),
            strict=True,
        ):
            name = f"r{next(self._numbers)}"
            request = Request(name, tenant, names[tenant].name, at, prompt, answer)
            if self.books.tenants[tenant].talk is not None:
                request.conversation = next(self._numbers)
                request.say(prompt)
            self._loop.call_at(at, self._arrive, request)
        dt = until - self._loop.time()
        self._runner.run(_sleep_until(until))
        books = self.books
        books.count(books.arrived, arrivals.tenant)
        books.worker_s += dt * (len(self._workers) + len(self._starting))
        books.ready_s += dt * len(self._workers)
        books.busy_s += sum(worker.take_busy_s() for worker in self._workers)
        loads = [worker.engine.load() for worker in self._workers]
        books.sequence_s += dt * sum(load.num_running + load.num_waiting for load in loads)
        waited_s = np.zeros(len(names))
        for request in self._requests.values():
            if not request.has_begun:
                age_s = until - request.arrived_at
                waited_s[request.tenant] = max(waited_s[request.tenant], age_s)
        books.contend(self._cost, waited_s, dt)
        self._cost[:] = 0.0

    def resize(self, size: int) -> None:
        """Start workers, or let the youngest ones drain and stop."""
        missing = size - self.num_ready - len(self._starting)
        for _ in range(missing):
            self._starting.append(self._loop.call_later(self._spec.start_s, self._start))
        for _ in range(-missing):
            if self._starting:
                self._starting.pop().cancel()
            else:
                staying = [worker for worker in self._workers if not worker.is_draining]
                self._runner.run(staying[-1].drain())
        self.size = size

    async def _open(self, num_workers: int) -> None:
        self._bus = MemoryBus()
        await self._bus.__aenter__()
        self._queue = topology.jobs_queue(MODEL, "interactive")
        self._overflow = topology.jobs_queue(MODEL, "overflow")
        await self._bus.declare(self._queue, self._overflow)
        backlog = Backlog(self._bus, self._spec.max_queue_wait_s, self._loop.time)
        self._live = LiveWorkers(
            self._bus, backlog, self._loop.time, has_affinity=self._spec.has_affinity
        )
        for _ in range(num_workers):
            self._add_worker()

    async def _demand(self) -> Demand:
        states = [await self._bus.inspect(one.name) for one in (self._queue, self._overflow)]
        loads = [worker.engine.load() for worker in self._workers]
        return Demand(
            sum(state.num_ready for state in states if state is not None),
            sum(worker.window.num_waiting for worker in self._workers),
            sum(
                load.num_waiting + worker.num_new
                for load, worker in zip(loads, self._workers, strict=True)
            ),
            sum(load.num_running for load in loads),
        )

    def _start(self) -> None:
        self._starting.pop(0)
        self._add_worker()

    def _add_worker(self) -> None:
        worker = ExactWorker(
            f"worker.{next(self._numbers)}",
            self._spec,
            self._weights,
            self._bus,
            self._requests,
            peers=self._workers,
            hear=self._live.hear,
            on_token=self._on_token,
            on_hand_over=self._on_hand_over,
        )
        self._workers.append(worker)
        task = self._loop.create_task(worker.run())
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, worker))

    def _ended(self, worker: ExactWorker, task: "asyncio.Task[None]") -> None:
        self._workers.remove(worker)
        self._tasks.remove(task)
        if not task.cancelled():
            task.result()

    def _arrive(self, request: Request) -> None:
        self._loop.create_task(self._publish(request))

    async def _publish(self, request: Request) -> None:
        """What a gateway does with a request."""
        ready = [worker.name for worker in self._workers if not worker.is_draining]
        num_in_flight = sum(one.tenant == request.tenant for one in self._requests.values())
        try:
            if ready:
                self._live.backlog.require_short_wait(MODEL, ready, num_in_flight)
            self._requests[request.name] = request
            await self._live.publish(job_of(request), "")
        except Overloaded:
            self._requests.pop(request.name, None)
            self.books.refused[request.tenant] += 1
        else:
            timeout_s = self._spec.request_timeout_s
            request.deadline = self._loop.call_later(timeout_s, self._expire, request)

    def _expire(self, request: Request) -> None:
        self._end(request)
        self.books.late[request.tenant] += 1
        request.cancel()

    def _on_token(self, request: Request, *, num_cached: int, is_last: bool) -> None:
        """A worker has generated a token of a request."""
        self._cost[request.tenant] += OUTPUT_TOKEN_COST
        if request.num_tokens == 1:
            self._cost[request.tenant] += PROMPT_TOKEN_COST * request.prompt
            seconds = np.array([self._loop.time() - request.arrived_at])
            self.books.first_tokens(np.array([request.tenant]), seconds)
            if request.turn:
                self.books.later_turn(request.tenant, float(seconds[0]), request.prompt, num_cached)
        if is_last:
            self._end(request)
            self.books.answered[request.tenant] += 1
            self._talk_on(request)

    def _talk_on(self, before: Request) -> None:
        """Let the next turn of a conversation arrive after a pause."""
        talk = self.books.tenants[before.tenant].talk
        if talk is None or before.turn + 1 >= talk.num_turns:
            return
        at = self._loop.time() + self._rng.exponential(talk.pause_s)
        question = int(talk.question.draw(self._rng, 1)[0])
        request = Request(
            f"r{next(self._numbers)}",
            before.tenant,
            before.tenant_name,
            at,
            before.prompt + before.answer + question,
            before.answer,
            conversation=before.conversation,
            # The device draws token 0.
            said=[*before.said, *[0] * before.answer],
            turn=before.turn + 1,
        )
        request.say(question)
        self.books.arrived[request.tenant] += 1
        self._loop.call_at(at, self._arrive, request)

    def _on_hand_over(self, request: Request) -> None:
        self.books.handed_over[request.tenant] += 1

    def _end(self, request: Request) -> None:
        self._requests.pop(request.name, None)
        if request.deadline is not None:
            request.deadline.cancel()


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
