"""Whether a job may run that its publisher has sent over AMQP. Its tenant may have limits and a
budget, which gateways know, and which the job shares with requests over HTTP."""

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import BusError, from_code
from shared.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    GenerationJob,
    LimitedTenants,
    QuickJob,
    encode,
)
from shared.messages.token_estimates import tokens_of, tokens_of_quick
from shared.telemetry import floods
from shared.telemetry.floods import FloodEvent
from worker.jobs.delivery import JobDelivery
from worker.jobs.metrics import JobMetrics

logger = logging.getLogger(__name__)

_PATIENCE_S = 8.0
"""Seconds for which a gateway is waited for. It decides within 5 s."""


class Terms(NamedTuple):
    """The terms on which a job may run."""

    is_counted: bool = False
    """Whether gateways count the job until they hear of its end."""
    max_total_tokens: int | None = None
    """The most tokens that the job may have; None: no limit."""

    def applied_to(self, job: GenerationJob) -> GenerationJob:
        """The job with these terms in addition to its own."""
        limits = (job.max_total_tokens, self.max_total_tokens)
        max_total_tokens = min((limit for limit in limits if limit is not None), default=None)
        is_counted = job.is_counted or self.is_counted
        return msgspec.structs.replace(
            job, is_counted=is_counted, max_total_tokens=max_total_tokens
        )


@dataclass(frozen=True, slots=True)
class _Told:
    """What a gateway has told this worker."""

    tenants: frozenset[str]
    until: float


class TenantAdmission:
    """Asks gateways whether the jobs of publishers may run.

    A gateway that does not answer is not asked again until it has been heard. If none is left, jobs
    run without limits: publishers do not depend on gateways.
    """

    def __init__(self, bus: Bus, worker: str, metrics: JobMetrics, *, job_timeout_s: float) -> None:
        """``worker`` is the address of this worker. ``job_timeout_s``: how long a job takes at most
        that has no deadline."""
        self._bus = bus
        self._worker = worker
        self._metrics = metrics
        self._job_timeout_s = job_timeout_s
        self._told: dict[str, _Told] = {}
        """What each gateway has told this worker, by the name of the gateway."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[AdmissionAnswer]] = {}
        """The requests without an answer, by number."""

    def obey(self, command: LimitedTenants | AdmissionAnswer) -> None:
        if isinstance(command, AdmissionAnswer):
            waiting = self._waiting.get(command.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(command)
        elif command.tenants:
            until = time.monotonic() + command.valid_s
            self._told[command.gateway] = _Told(frozenset(command.tenants), until)
        else:
            self._told.pop(command.gateway, None)

    async def terms_of(self, job: GenerationJob | QuickJob, delivery: JobDelivery) -> Terms:
        """The terms on which a job that is delivered may run. A gateway is asked about a job that a
        publisher has just sent.

        Raises the `WarrenError` with which the job is to be answered if it may not run.
        """
        if not delivery.is_new:
            return Terms(is_counted=delivery.may_have_been_admitted)
        was_asked = False
        while (gateway := self._gateway_for(job.tenant)) is not None:
            was_asked = True
            answer = await self._ask(gateway, job)
            if answer is None:
                self._told.pop(gateway, None)
            elif answer.code:
                raise from_code(answer.code, answer.message, answer.param)
            else:
                return Terms(answer.is_counted, answer.max_total_tokens)
        if was_asked:
            self._metrics.unchecked.labels(self._metrics.model).inc()
            facts = {"request_id": job.request_id, "tenant": job.tenant, "worker": self._worker}
            event: FloodEvent = "limits not checked"
            facts["reason"] = "no gateway answers"
            floods.warn(logger, event, event, facts, job.tenant)
        return Terms()

    def _gateway_for(self, tenant: str) -> str | None:
        """The gateway to ask about a job; None if the tenant has no limits.

        All workers ask the same gateway: two gateways that decide at once may refuse two jobs
        although there is room for either.
        """
        now = time.monotonic()
        asked = [
            name
            for name, told in self._told.items()
            if tenant in told.tenants and now <= told.until
        ]
        return min(asked, default=None)

    async def _ask(self, gateway: str, job: GenerationJob | QuickJob) -> AdmissionAnswer | None:
        """The answer of a gateway; None if it does not answer in time."""
        number = next(self._numbers)
        request = AdmissionRequest(
            gateway=gateway,
            worker=self._worker,
            number=number,
            request_id=job.request_id,
            tenant=job.tenant,
            num_tokens=(tokens_of(job) if isinstance(job, GenerationJob) else tokens_of_quick(job)),
            deadline=job.deadline or time.time() + self._job_timeout_s,
        )
        waiting: asyncio.Future[AdmissionAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._bus.publish(topology.USAGE, Message(encode(request)))
                return await waiting
        except (BusError, TimeoutError):
            return None
        finally:
            del self._waiting[number]
