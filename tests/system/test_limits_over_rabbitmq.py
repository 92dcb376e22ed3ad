"""Gateways that share limits over a real broker, with the shipped permissions."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, product
from typing import NamedTuple

import msgspec
import pytest

from gateway.intake import limits as gateway_limits
from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.keys.tenant_limits import TenantLimits
from gateway.intake.limits import Limits
from gateway.tenants import publishers
from gateway.tenants.publishers import PublisherAdmission
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.errors import RateLimited
from shared.messages import (
    AdmissionRequest,
    Cancel,
    Failed,
    Finished,
    GenerationJob,
    SamplingParams,
    encode,
)
from tests.support.deployment.broker import Broker
from tests.support.gateway.http import eventually, running_limits
from tests.support.workers.jobs import ask, new_job
from tests.support.workers.synthetic import echo_worker
from worker.jobs import admission

pytestmark = pytest.mark.rabbit

NOW = time.time()
"""The gateways' time, which does not pass: no window of a minute ends during a test."""
PATIENCE_S = 600.0
KEY = ApiKey("00aa", "alice", "", "", requests_per_minute=5)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways and workers wait for each other as long as it takes."""
    monkeypatch.setattr(gateway_limits, "_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(admission, "_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(publishers, "_VALID_S", PATIENCE_S)


@asynccontextmanager
async def gateway(broker: Broker) -> AsyncIterator[Limits]:
    """The limits of a gateway."""
    async with (
        RabbitBus(broker.url_of("gateway")) as bus,
        running_limits(Limits(bus, max_detached=3, clock=lambda: NOW), bus) as limits,
    ):
        yield limits


async def is_admitted(limits: Limits) -> bool:
    try:
        async with limits.admit(KEY) as grant:
            grant.note_published()
    except RateLimited:
        return False
    return True


async def test_two_gateways_admit_together_what_a_key_may_have(broker: Broker) -> None:
    async with gateway(broker) as first, gateway(broker) as other:
        admitted = [await is_admitted(limits) for limits in (first, other) * 4]

    assert admitted == [True] * 5 + [False] * 3


PUBLISHER = "publisher"
ENDLESS = SamplingParams(max_tokens=8000, ignore_eos=True)
_NUMBERS = count()


def job_of_publisher(sampling: SamplingParams | None = None) -> GenerationJob:
    job = new_job("echo", sampling=sampling)
    return msgspec.structs.replace(job, request_id=f"{PUBLISHER}.limited-{next(_NUMBERS)}")


class Limited(NamedTuple):
    """Two gateways and two workers, which ask them about every job of the publisher."""

    gateways: list[Limits]
    workers: list[str]

    @property
    def num_requests(self) -> list[int]:
        """What each gateway has counted."""
        return [limits.use_of_tenant(PUBLISHER).num_requests for limits in self.gateways]

    @property
    def num_running(self) -> list[int]:
        return [limits.use_of_tenant(PUBLISHER).num_running for limits in self.gateways]


@asynccontextmanager
async def gateway_for(
    broker: Broker, workers: list[str], asked: set[str], limits: TenantLimits
) -> AsyncIterator[Limits]:
    """A gateway that admits the publisher's jobs, and adds the workers that ask to ``asked``."""
    keys = Keys(None)
    keys.accept_stored({}, {PUBLISHER: limits})
    async with RabbitBus(broker.url_of("gateway")) as bus:
        counted = Limits(bus, max_detached=3, clock=lambda: NOW)
        admitting = PublisherAdmission(bus, keys, counted, lambda: workers)

        def hear(request: AdmissionRequest) -> None:
            asked.add(request.worker)
            admitting.hear(request)

        async with running_limits(counted, bus, hear):
            await admitting.tell()
            yield counted


@asynccontextmanager
async def limited(
    broker: Broker, publisher: RabbitBus, limits: TenantLimits
) -> AsyncIterator[Limited]:
    async with (
        RabbitBus(broker.url_of("worker")) as first,
        RabbitBus(broker.url_of("worker")) as second,
        echo_worker(first, step_s=0.01),
        echo_worker(second, step_s=0.01),
    ):
        workers, asked = set[str](), set[str]()
        while len(workers) < 2:
            log = await ask(publisher, job_of_publisher())
            workers.add(str(log.reader.worker))
        async with (
            gateway_for(broker, sorted(workers), asked, limits) as one,
            gateway_for(broker, sorted(workers), asked, limits) as other,
        ):
            while asked != workers:
                await ask(publisher, job_of_publisher())
            yield Limited([one, other], sorted(workers))


async def test_as_many_jobs_of_a_publisher_run_as_its_tenant_may_have_on_all_workers(
    broker: Broker,
) -> None:
    async with (
        RabbitBus(broker.url_of(PUBLISHER)) as publisher,
        limited(broker, publisher, TenantLimits(requests_per_minute=20)) as deployment,
    ):
        num_before = max(deployment.num_requests)
        logs = await asyncio.gather(*(ask(publisher, job_of_publisher()) for _ in range(25)))

        async def are_counted() -> bool:  # by the gateway that was not asked, too
            return deployment.num_requests == [20, 20]

        await eventually(are_counted)

    ends = Counter(last.code if isinstance(last := log.last, Failed) else "" for log in logs)
    assert ends == {"": 20 - num_before, "rate_limit_exceeded": 5 + num_before}
    refused = [log.raw for log in logs if isinstance(log.last, Failed)]
    assert all(len(raw) == 1 for raw in refused)
    assert "requests per minute of the tenant publisher: Limit 20, Used 20" in str(refused[0])


async def test_as_many_jobs_of_a_publisher_run_at_once_as_its_tenant_may_have(
    broker: Broker,
) -> None:
    async with (
        RabbitBus(broker.url_of(PUBLISHER)) as publisher,
        limited(broker, publisher, TenantLimits(max_concurrent=2)) as deployment,
    ):

        async def is_idle() -> bool:
            return deployment.num_running == [0, 0]

        await eventually(is_idle)
        jobs = [job_of_publisher(ENDLESS) for _ in range(5)]
        reads = [asyncio.create_task(ask(publisher, job)) for job in jobs]

        async def are_refused() -> bool:
            return sum(task.done() for task in reads) == 3 and deployment.num_running == [2, 2]

        await eventually(are_refused)
        for job, address in product(jobs, deployment.workers):
            cancel = Message(encode(Cancel(request_id=job.request_id)))
            await publisher.publish(topology.worker_binding(address), cancel)
        logs = await asyncio.gather(*reads)
        await eventually(is_idle)
        later = await ask(publisher, job_of_publisher())

    codes = Counter(log.last.code for log in logs if isinstance(log.last, Failed))
    assert codes == {"rate_limit_exceeded": 3, "cancelled": 2}
    assert isinstance(later.last, Finished)
