"""Equal requests, which share an execution while workers and gateways are killed."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.deployment.processes import WarrenProcess
from tests.system.chaos.callers import Caller, Question, StreamFailed
from tests.system.chaos.campaign import Fault, Row, patient_client
from tests.system.chaos.deployment import Deployment

_BETWEEN_FAULTS_S = 1.0
_BEGINS_WITHIN_S = 60.0
_LOOK_INTERVAL_S = 0.05
_STARTED, _TAKEN_OVER = "job started", "job taken over"


class Runs:
    """The runs of an execution, which are the only runs of a deployment, from the logs of its
    workers. The log of a worker that was killed still has its runs."""

    def __init__(self, deployment: Deployment) -> None:
        """Runs that have begun before do not count."""
        self._deployment = deployment
        self._starts = {one.log_path: len(one.log) for one in deployment.workers}
        self._num_kills = 0

    def problems(self) -> list[str]:
        """What differs from a single execution that all killed workers had."""
        lines = [line for line, _ in self._begun()]
        num_executions = len({line["execution"] for line in lines})
        num_taken_over = sum(line["event"] == _TAKEN_OVER for line in lines)
        problems = []
        if num_executions != 1:
            problems.append(f"{num_executions} executions have begun")
        if num_taken_over < self._num_kills:
            problems.append(f"{num_taken_over} runs continue those of {self._num_kills} workers")
        return problems

    async def kill_worker(self) -> None:
        """Kill the worker that has the execution, as soon as a worker has it again."""
        worker = await self._next_worker()
        self._num_kills += 1
        await self._deployment.kill_worker(worker)

    async def kill_worker_and_gateway(self) -> None:
        await asyncio.gather(self.kill_worker(), self._deployment.kill_gateway())

    async def _next_worker(self) -> WarrenProcess:
        async with asyncio.timeout(_BEGINS_WITHIN_S):
            while True:
                begun = sorted(self._begun(), key=lambda run: str(run[0]["timestamp"]))
                if len(begun) > self._num_kills:
                    return begun[-1][1]
                await asyncio.sleep(_LOOK_INTERVAL_S)

    def _begun(self) -> Iterator[tuple[dict[str, Any], WarrenProcess]]:
        """The log line of each beginning of a run, and its worker."""
        for worker in self._deployment.workers:
            for line in worker.log[self._starts[worker.log_path] :].splitlines():
                if _STARTED in line or _TAKEN_OVER in line:
                    yield json.loads(line), worker


async def equal_requests(
    deployment: Deployment,
    question: Question,
    expected: str,
    num_clients: int,
    faults: Callable[[Runs], Sequence[Fault]],
) -> Row:
    """Ask the same at all gateways while ``faults`` strike: every client gets the whole answer, and
    it is computed once."""
    runs = Runs(deployment)
    striking = faults(runs)
    row = Row(f"equal requests: {num_clients}", len(striking))
    began_at = time.monotonic()
    async with patient_client() as client:

        async def ask() -> None:
            tenant = deployment.tenants[0]
            caller = Caller(client, deployment.urls, tenant, is_shared=True)
            try:
                row.tally.compare(await caller.ask(question, row.tally), expected)
            except StreamFailed as error:
                row.tally.fail(str(error))

        async with asyncio.TaskGroup() as asking:
            for _ in range(num_clients):
                asking.create_task(ask())
            for fault in striking:
                await asyncio.sleep(_BETWEEN_FAULTS_S)
                await fault()
    row.duration_s = time.monotonic() - began_at
    for problem in runs.problems():
        row.tally.fail(problem)
    return row
