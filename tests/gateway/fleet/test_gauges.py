"""The gauges of the whole fleet."""

import msgspec

from tests.support.gateway.http import LiveGateway, eventually
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker


async def test_the_sequences_of_all_workers_are_counted_by_class(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.announcement = msgspec.structs.replace(
        worker.announcement, max_num_seqs=8, num_running=5, num_running_batch=2, batch_reserve=1
    )
    expected = {
        f'warren_fleet_sequences_{kind}{{class="{job_class}",model="{MODEL}"}} {count}.0'
        for kind, job_class, count in (
            ("running", "interactive", 3),
            ("running", "batch", 2),
            ("free", "interactive", 3),
            ("free", "batch", 2),
        )
    }

    async def are_counted() -> bool:
        return expected <= set((await gateway.http.get("/metrics")).text.splitlines())

    await eventually(are_counted)
