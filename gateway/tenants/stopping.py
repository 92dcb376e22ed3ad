"""Ends all work of an API key or of a tenant, at all gateways."""

import asyncio
from contextlib import suppress
from typing import NamedTuple

from gateway.intake.limits import Limits
from gateway.log.registry import Relays
from gateway.store.batches import Batches
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import StreamExpired, StreamNotFound
from shared.messages import StopWork, encode

SETTLED_S = 1.5
"""Seconds within which every gateway has read that keys are revoked, and within which cancelled
requests have ended and are recorded."""


class StoppedWork(NamedTuple):
    num_batches: int
    """Batches that are being cancelled."""
    num_detached: int
    """Requests without a client that were cancelled."""


class WorkStopper:
    """Stops work at this gateway, and tells the others to."""

    def __init__(
        self, bus: Bus, relays: Relays, limits: Limits, settled_s: float = SETTLED_S
    ) -> None:
        self.settled_s = settled_s
        self._bus = bus
        self._relays = relays
        self._limits = limits

    async def stop(self, work: StopWork, batches: Batches) -> StoppedWork:
        """Begin to cancel all streams, batches and detached requests, once all gateways know that
        no more begin. Raises `Unavailable` and `BusError`."""
        await asyncio.sleep(self.settled_s)
        num_batches = await batches.cancel_all(tenant=work.tenant, key_id=work.key_id)
        await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(work)))
        left = self._limits.left_of(work)
        for request_id in left:
            with suppress(StreamExpired, StreamNotFound):  # it has just ended
                await self._relays.cancel(request_id, None)
            self._limits.end(request_id)
        return StoppedWork(num_batches, len(left))

    def obey(self, work: StopWork) -> None:
        """Cancel the requests whose streams this gateway reads, as any gateway has asked all."""
        cancelled = self._relays.cancel_all(lambda relay: work.covers(relay.tenant, relay.key_id))
        for request_id in cancelled:
            self._limits.end(request_id)
