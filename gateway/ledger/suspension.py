"""Tells workers which tenants have spent their budgets, because the jobs of AMQP publishers pass no
gateway."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from gateway.ledger.budgets import Budgets
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import BusError
from shared.messages import SpentBudgets, encode

_INTERVAL_S = 5.0
_VALID_S = 60.0
"""Seconds after which workers forget what they were told, if all gateways are gone."""


class Suspension:
    """Repeats to all workers which tenants have spent their budgets, as long as any has."""

    def __init__(
        self,
        bus: Bus,
        budgets: Budgets,
        addresses: Callable[[], Iterable[str]],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """``addresses`` are those of the live workers."""
        self._bus = bus
        self._budgets = budgets
        self._addresses = addresses
        self._interval_s = interval_s
        self._has_told = False
        """Whether workers know of a tenant."""

    async def run(self) -> None:
        """Tell the workers again and again; never returns."""
        while True:
            await self.tell()
            await asyncio.sleep(self._interval_s)

    async def tell(self) -> None:
        """Tell all workers which tenants have spent their budgets. If none has, they are told once.
        What does not reach a worker is repeated."""
        spent = self._budgets.spent()
        if not spent and not self._has_told:
            return
        self._has_told = bool(spent)
        command = Message(encode(SpentBudgets(tenants=spent, valid_s=_VALID_S)))
        for address in self._addresses():
            with suppress(BusError):  # a worker that has just left
                await self._bus.publish(topology.worker_binding(address), command)
