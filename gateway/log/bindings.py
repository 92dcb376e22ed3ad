"""Notices that logs have lost their bindings, and binds them again.

A worker that finds a log without a binding waits half a minute for the binding to return
(`worker.jobs.delivery`), so streams continue once their logs are bound again.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Message, Queue
from shared.bus.upkeep import report_unbound
from shared.errors import BusError, BusUnavailable, PublishRefused, QueueDown, Unroutable

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 2.0


class LogBindings:
    """Publishes to a queue of its own that is bound like the logs. When the message finds no queue,
    an operator has removed the exchange and restored it, and all logs are bound again."""

    def __init__(
        self,
        bus: Bus,
        logs: Callable[[], Iterable[Queue]],
        interval_s: float = _LOOK_INTERVAL_S,
    ) -> None:
        """``logs`` returns the logs that this gateway reads, or will read."""
        self._bus = bus
        self._logs = logs
        self._interval_s = interval_s
        self._probe = _new_probe()

    async def run(self) -> None:
        """Look at intervals; never returns."""
        while True:
            await self._bus.wait_connected()
            with suppress(BusUnavailable):  # the next look follows
                await self._look()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        """Raises `BusUnavailable`."""
        try:
            if await self._bus.inspect(self._probe.name) is None:  # which renews its expiry
                await self._bus.declare(self._probe)
        except QueueDown:
            self._probe = _new_probe()
            return
        binding = self._probe.bindings[0]
        try:
            await self._bus.publish(binding, Message(b""))
        except PublishRefused:  # it has its message
            pass
        except Unroutable:
            report_unbound(binding.exchange.name, binding.routing_key)
            await self._bind_all()

    async def _bind_all(self) -> None:
        """Bind all logs, then the probe. Raises `BusUnavailable`."""
        num_bound = 0
        for queue in list(self._logs()):
            try:
                await self._bus.bind(queue)
                num_bound += 1
            except QueueDown:
                continue
            except BusUnavailable:
                raise
            except BusError:  # it has ended, or the exchange is still missing
                continue
        with suppress(BusError):
            await self._bus.bind(self._probe)
            logger.warning("logs bound again", extra={"logs": num_bound})


def _new_probe() -> Queue:
    return topology.probe_queue(secrets.token_hex(16))
