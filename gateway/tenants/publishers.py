"""Admits the jobs that publishers send to workers over AMQP, within the limits and the budgets of
their tenants.

No gateway sees these jobs. Gateways therefore tell all workers which tenants have limits or
budgets, and a worker that receives a new job of such a tenant asks a gateway before it runs the
job. The gateway counts the job together with the requests over HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Limits
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import BusError, WarrenError
from shared.messages import AdmissionAnswer, AdmissionRequest, LimitedTenants, encode
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_REPEAT_S = 5.0
_VALID_S = 15.0
"""Seconds after which workers do not ask a gateway any more that has become silent."""


class PublisherAdmission:
    """Tells workers whose jobs need an admission, and answers their requests."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        limits: Limits,
        addresses: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keys`` know the limits of tenants. ``addresses`` are the addresses of the live
        workers."""
        self._bus = bus
        self._keys = keys
        self._limits = limits
        self._addresses = addresses
        self._clock = clock
        self._told: tuple[str, ...] = ()
        """The tenants that the workers were told last."""
        self._told_at: dict[str, float] = {}
        """When each worker was told of ``_told``, by address."""
        self._has_left = False
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Tell the workers again and again; never returns."""
        while True:
            await self.tell()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def tell(self) -> None:
        """Tell a worker which tenants have limits or budgets if it is new, if this has changed, or
        if it was told 5 s ago. If no tenant has any, workers are told once. A message that does not
        reach a worker is repeated."""
        tenants = self._limited()
        if tenants != self._told:
            self._told, self._told_at = tenants, {}
        elif not tenants:
            return
        command = LimitedTenants(gateway=self._limits.name, tenants=tenants, valid_s=_VALID_S)
        now = self._clock()
        for address in self._addresses():
            if now - self._told_at.get(address, -_REPEAT_S) >= _REPEAT_S:
                with suppress(BusError):  # a worker that has just left
                    await self._bus.publish(
                        topology.worker_binding(address), Message(encode(command))
                    )
                    self._told_at[address] = now

    async def leave(self) -> None:
        """Tell the workers to ask this gateway no more, because it ends."""
        self._has_left = True
        await self.tell()

    def hear(self, request: AdmissionRequest) -> None:
        """Answer the request of a worker, if it is for this gateway."""
        if request.gateway == self._limits.name:
            task = asyncio.create_task(self._answer(request))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def _limited(self) -> tuple[str, ...]:
        if self._has_left:
            return ()
        tenants = self._keys.tenants.items()
        limited = (
            tenant
            for tenant, limits in tenants
            if limits.are_counted or limits.monthly_budget is not None
        )
        return tuple(sorted(limited))

    async def _answer(self, request: AdmissionRequest) -> None:
        with incidents.survived("task", "publisher's job not admitted", tenant=request.tenant):
            answer = Message(encode(await self._decided(request)))
            try:
                await self._bus.publish(topology.worker_binding(request.worker), answer)
            except BusError as error:  # the worker has left, or asks another gateway in a while
                facts = {"worker": request.worker, "reason": error.code}
                logger.info("admission not answered", extra=facts)

    async def _decided(self, request: AdmissionRequest) -> AdmissionAnswer:
        of_tenant = self._keys.limits_of(request.tenant)
        key = ApiKey("", request.tenant, "", "", of_tenant=of_tenant)
        try:
            await self._limits.admit_published(
                key, request.request_id, request.num_tokens, request.deadline
            )
        except WarrenError as error:
            return AdmissionAnswer(
                number=request.number, code=error.code, message=error.message, param=error.param
            )
        return AdmissionAnswer(
            number=request.number,
            is_counted=key.counts_jobs,
            max_total_tokens=key.max_total_tokens,
        )
