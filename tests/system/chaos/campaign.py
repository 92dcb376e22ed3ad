"""Disturbs a deployment repeatedly while callers ask, and counts the results of their streams."""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.deployment.processes import NO_TLS
from tests.system.chaos.callers import Caller, Leaver, Question, StreamFailed, Tally
from tests.system.chaos.deployment import Deployment
from tests.system.chaos.tenants import Tenant

logger = logging.getLogger(__name__)

Fault = Callable[[], Awaitable[None]]
Plan = Mapping[str, tuple[Fault, int]]
"""Each fault and how often it strikes, by its name in the table."""

CALLERS_PER_LEAVER = 3
_BETWEEN_FAULTS_S = 0.7
_OUTAGE_S = 3.0
"""A fault that lasts this long is an outage, and the next fault waits until it is over: the
promises hold for outages that end within the deployment's settings, not for their sum."""
_RECOVERS_WITHIN_S = 120.0


@dataclass
class Row:
    """A kind of fault, and all streams that were open during it."""

    fault: str
    num_tries: int
    tally: Tally = field(default_factory=Tally)
    duration_s: float = 0.0

    @property
    def title(self) -> str:
        """The fault, and what was noted beside it."""
        noted = [f"{num} {what}" for what, num in self.tally.noted.items()]
        return ", ".join([self.fault, *noted])

    @property
    def num_wrong(self) -> int:
        tally = self.tally
        return tally.num_lost + tally.num_repeated + tally.num_changed + tally.num_failed

    def __str__(self) -> str:
        tally = self.tally
        return (
            f"{self.title}: {self.num_tries} tries, {tally.num_streams} streams,"
            f" {tally.num_left} left, {tally.num_limited} limited, {tally.num_resumed} resumed,"
            f" worst gap {tally.worst_gap_s:.2f} s, {self.duration_s:.0f} s,"
            f" {tally.num_diverged} diverged, {self.num_wrong} wrong"
        )


Check = Callable[[Caller, Question, str, Tally], Awaitable[None]]
"""Asks a question, compares what comes with the undisturbed answer, and counts it. Raises
`StreamFailed`."""


async def equals_undisturbed(
    caller: Caller, question: Question, expected: str, tally: Tally
) -> None:
    tally.compare(await caller.ask(question, tally), expected)


async def equals_its_log(caller: Caller, question: Question, expected: str, tally: Tally) -> None:
    """For answers that an engine does not repeat exactly."""
    text, logged = await caller.ask_and_read_again(question, tally)
    tally.compare(text, logged)
    tally.num_diverged += text != expected


class Campaign:
    """``expected`` contains the undisturbed answer to each question."""

    def __init__(
        self,
        deployment: Deployment,
        expected: Mapping[Question, str],
        num_callers: int,
        *,
        check: Check = equals_undisturbed,
    ) -> None:
        """``check``: what a caller does with each question."""
        self._deployment = deployment
        self._expected = expected
        self._num_callers = num_callers
        self._check = check

    async def run(self, plan: Plan) -> list[Row]:
        return [await self.under(name, fault, num) for name, (fault, num) in plan.items()]

    async def under(self, name: str, fault: Fault, num_tries: int) -> Row:
        """Ask continuously while ``fault`` strikes this many times."""
        row = Row(name, num_tries)
        began_at = time.monotonic()
        async with self._asking(row.tally):
            for number in range(num_tries):
                await asyncio.sleep(_BETWEEN_FAULTS_S)
                struck_at = time.monotonic()
                await fault()
                if time.monotonic() - struck_at > _OUTAGE_S and number + 1 < num_tries:
                    await self._recover(row.tally)
        row.duration_s = time.monotonic() - began_at
        logger.info("%s", row)
        return row

    async def _recover(self, tally: Tally) -> None:
        """Wait until as many streams have ended as there are callers."""
        num_streams = tally.num_streams + self._num_callers
        async with asyncio.timeout(_RECOVERS_WITHIN_S):
            while tally.num_streams < num_streams:  # noqa: ASYNC110 - callers count, and tell nobody
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def _asking(self, tally: Tally) -> AsyncIterator[None]:
        is_over = asyncio.Event()
        async with patient_client() as client, asyncio.TaskGroup() as callers:
            for number in range(self._num_callers):
                callers.create_task(self._ask(client, number, tally, is_over))
            num_leavers = math.ceil(self._num_callers / CALLERS_PER_LEAVER)
            async with leaving(self._deployment, list(self._expected), num_leavers, tally):
                try:
                    yield
                finally:
                    is_over.set()

    async def _ask(
        self, client: httpx.AsyncClient, number: int, tally: Tally, is_over: asyncio.Event
    ) -> None:
        caller = Caller(client, self._deployment.urls, _tenant(self._deployment, number))
        questions = list(self._expected)
        while not is_over.is_set():
            question = questions[number % len(questions)]
            number += self._num_callers
            try:
                await self._check(caller, question, self._expected[question], tally)
            except StreamFailed as error:
                logger.warning("failed: %s", error)
                tally.fail(str(error))


@asynccontextmanager
async def leaving(
    deployment: Deployment, questions: Sequence[Question], num_clients: int, tally: Tally
) -> AsyncIterator[None]:
    """Have so many clients ask and leave, again and again."""
    is_over = asyncio.Event()

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        leaver = Leaver(client, deployment.urls, _tenant(deployment, number))
        while not is_over.is_set():
            await leaver.ask(random.choice(questions), tally)

    async with patient_client() as client, asyncio.TaskGroup() as leavers:
        for number in range(num_clients):
            leavers.create_task(leave(client, number))
        try:
            yield
        finally:
            is_over.set()


def _tenant(deployment: Deployment, number: int) -> Tenant:
    return deployment.tenants[number % len(deployment.tenants)]


def patient_client(timeout_s: float = 30) -> httpx.AsyncClient:
    """A client that opens a connection for each request, because the previous gateway may be
    dead."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=timeout_s, limits=limits, verify=NO_TLS)


async def answers(deployment: Deployment, questions: list[Question]) -> dict[Question, str]:
    """The undisturbed answer to each question."""
    async with patient_client() as client:
        caller = Caller(client, deployment.urls, deployment.tenants[0])
        texts = await asyncio.gather(*(caller.ask(q, Tally()) for q in questions))
    return dict(zip(questions, texts, strict=True))
