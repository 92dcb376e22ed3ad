"""Equal requests, which share an execution while workers and gateways are killed."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

from gateway.store.database import SQLITE_FILE
from tests.system.chaos.callers import Caller, Question, StreamFailed
from tests.system.chaos.campaign import Row, patient_client
from tests.system.chaos.deployment import Deployment

_BETWEEN_FAULTS_S = 1.0
_RECORDED_WITHIN_S = 30.0


async def equal_requests(
    deployment: Deployment,
    question: Question,
    expected: str,
    num_clients: int,
    faults: Sequence[Callable[[], Awaitable[None]]],
) -> Row:
    """Ask the same at all gateways while ``faults`` strike: every client gets the whole answer, and
    it is computed once."""
    row = Row(f"equal requests: {num_clients}", len(faults))
    asked_at, began_at = time.time(), time.monotonic()
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
            for fault in faults:
                await asyncio.sleep(_BETWEEN_FAULTS_S)
                await fault()
    row.duration_s = time.monotonic() - began_at
    num_computed = await _settled(deployment.data_dir, asked_at)
    if num_computed != 1:
        row.tally.fail(f"{num_computed} executions are recorded")
    return row


async def _settled(data_dir: Path, since: float) -> int:
    """The number of executions that have ended since a time, once one is recorded."""
    until = time.monotonic() + _RECORDED_WITHIN_S
    while not _num_computed(data_dir, since) and time.monotonic() < until:  # noqa: ASYNC110 - another process writes
        await asyncio.sleep(0.1)
    return _num_computed(data_dir, since)


def _num_computed(data_dir: Path, since: float) -> int:
    """How many executions of the gateways' database have ended since a time."""
    with closing(sqlite3.connect(data_dir / SQLITE_FILE)) as database:
        query = "SELECT COUNT(*) FROM usage WHERE NOT is_cached AND ended_at > ?"
        return int(database.execute(query, (since,)).fetchone()[0])
