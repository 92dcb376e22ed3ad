"""Exchanges, queues and bindings that operators remove while processes rely on them.

A broker keeps a queue whose bindings or exchange were removed, and tells nobody. What a process has
declared is therefore declared again, at intervals and as soon as a message finds no queue.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from shared.bus.base import Bus, Exchange, Queue
from shared.errors import AccessRefused, BusError, BusUnavailable
from shared.telemetry.metrics import PROCESS

logger = logging.getLogger(__name__)

_INTERVAL_S = 30.0
_MIN_PAUSE_S = 1.0

_losses = PROCESS.counter(
    "warren_topology_losses_total",
    "Losses of what the broker should have, as they were noticed: missing (an exchange or a queue "
    "did not exist) or unbound (a message found no queue where a binding should be).",
    "loss",
    begin=("missing", "unbound"),
)


def report_unbound(exchange: str, routing_key: str, **facts: object) -> None:
    """Log and count a message that found no queue although a queue should be bound."""
    _losses.labels("unbound").inc()
    facts = {"exchange": exchange, "routing_key": routing_key, **facts}
    logger.warning("binding lost", extra=facts)


class Upkeep:
    """Declares a process's lasting exchanges and queues again."""

    def __init__(
        self,
        bus: Bus,
        resources: Callable[[], Iterable[Exchange | Queue]],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._bus = bus
        self._resources = resources
        self._interval_s = interval_s
        self._asked = asyncio.Event()
        self._reasons: dict[str, str] = {}
        """Why resources could not be declared, by name."""
        self._seen: set[str] = set()
        """The names of resources that the broker had. Only these can be lost."""

    def ask(self) -> None:
        """Declare everything soon, because something seems to be missing."""
        self._asked.set()

    async def run(self) -> None:
        """Declare everything at intervals, and whenever it was asked for; never returns."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self._bus.wait_connected()
            for resource in self._resources():
                await self._declare(resource)
            await asyncio.sleep(min(_MIN_PAUSE_S, self._interval_s))

    async def _declare(self, resource: Exchange | Queue) -> None:
        try:
            missing = await self._bus.declare_again(resource)
        except BusUnavailable:  # the next round follows
            return
        except BusError as error:
            self._refused(resource, error)
            return
        self._reasons.pop(resource.name, None)
        lost = [name for name in missing if name in self._seen]
        self._seen.update(missing, (resource.name,))
        for name in lost:
            _losses.labels("missing").inc()
            logger.warning("declared again", extra={"resource": name})

    def _refused(self, resource: Exchange | Queue, error: BusError) -> None:
        """Report, once, a resource that cannot be declared."""
        if self._reasons.get(resource.name) == error.code:
            return
        self._reasons[resource.name] = error.code
        _losses.labels("missing").inc()
        remedy = "import infra/rabbitmq/definitions.json again"
        facts = {"resource": resource.name, "reason": error.message}
        if isinstance(error, AccessRefused):
            facts["remedy"] = remedy
        logger.error("cannot be declared again", extra=facts)
