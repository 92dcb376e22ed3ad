"""Requests that kill their worker, among many harmless requests."""

import asyncio
import time
from collections.abc import Mapping

from shared.errors import WorkerLost
from tests.system.chaos.callers import Caller, Leaver, Question, StreamFailed
from tests.system.chaos.campaign import CALLERS_PER_LEAVER, Row, patient_client
from tests.system.chaos.deployment import Deployment
from tests.system.chaos.worker import DEADLY_TOKEN

MAX_DEATHS = 4
"""Deaths per deadly request: three, and a fourth if a worker dies before its `Started` is sent."""


async def poison(
    deployment: Deployment, expected: Mapping[Question, str], num_innocent: int, num_deadly: int
) -> Row:
    """Ask everything at once: harmless requests are answered, and deadly requests end with a single
    clear error."""
    row = Row(f"{num_deadly} deadly requests among {num_innocent + num_deadly}", num_deadly)
    questions = list(expected)
    began_at = time.monotonic()
    tenants = deployment.tenants
    async with deployment.supervised() as deaths, patient_client() as client:

        async def ask_innocent(number: int) -> None:
            question = questions[number % len(questions)]
            try:
                tenant = tenants[number % len(tenants)]
                text = await Caller(client, deployment.urls, tenant).ask(question, row.tally)
                row.tally.compare(text, expected[question])
            except StreamFailed as error:
                row.tally.fail(str(error))

        async def ask_deadly(number: int) -> None:
            question = Question("echo", [number + 1, DEADLY_TOKEN], 60, seed=number)
            try:
                await Caller(client, deployment.urls, tenants[0]).ask(question, row.tally)
                row.tally.fail("a deadly request was answered")
            except StreamFailed as error:
                if error.code == WorkerLost.code:
                    row.tally.num_streams += 1
                else:
                    row.tally.fail(str(error))

        leaver = Leaver(client, deployment.urls, tenants[0])
        every = max(1, num_innocent // num_deadly)
        async with asyncio.TaskGroup() as asking:
            for number in range(num_innocent):
                asking.create_task(ask_innocent(number))
                if number % CALLERS_PER_LEAVER == 0:
                    asking.create_task(leaver.ask(questions[number % len(questions)], row.tally))
                if number % every == 0 and number // every < num_deadly:
                    asking.create_task(ask_deadly(number // every))
    if deaths.num > MAX_DEATHS * num_deadly:
        row.tally.fail(f"{deaths.num} workers died of {num_deadly} deadly requests")
    row.duration_s = time.monotonic() - began_at
    return row
