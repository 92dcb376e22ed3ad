"""Tries the deliveries that are due, beside the gateway's other work.

Any gateway may try a delivery. A try that a gateway does not finish is made again when its lease
has ended, so that an event arrives at least once.
"""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress

from gateway.metrics import Metrics
from gateway.store.state import Store
from gateway.store.webhooks import WebhookDelivery, Webhooks
from gateway.webhooks.sending import TIMEOUT_S, NotSent, Sender, is_success
from shared.backoff import Backoff
from shared.errors import Unavailable
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
LEASE_S = 3 * TIMEOUT_S
_MAX_PAUSE_S = 6 * 3600
_MAX_WAIT_S = 3 * 24 * 3600
_MIN_TRYING_S = 3600
"""Seconds that a gateway tries due deliveries before it gives up deliveries that have waited for
too long, because no gateway may have run for days."""
_MAX_AT_ONCE = 32
_MAX_OF_ONE = 4
"""Tries of an endpoint at once, so that a slow endpoint does not hold up the others."""


class Deliverer:
    """Delivers events at a gateway."""

    def __init__(
        self,
        store: Store,
        sender: Sender,
        metrics: Metrics,
        *,
        max_tries: int,
        first_pause_s: float,
        lease_s: float = LEASE_S,
        look_interval_s: float = _LOOK_INTERVAL_S,
    ) -> None:
        self._look_interval_s = look_interval_s
        self.sender = sender
        self._store = store
        self._metrics = metrics
        self._max_tries = max_tries
        self._first_pause_s = first_pause_s
        self._lease_s = lease_s
        self._running: Counter[str] = Counter()
        """The tries under way, by endpoint."""
        self._has_room = asyncio.Event()
        """Set when a try has ended."""

    async def run(self) -> None:
        """Deliver until cancelled. Another gateway then tries the current deliveries again."""
        expired_at = time.monotonic() + _MIN_TRYING_S
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._has_room.clear()
                with suppress(Unavailable):
                    webhooks = (await self._store.wait_open()).webhooks
                    if time.monotonic() - expired_at >= self._look_interval_s:
                        await self.expire(webhooks)
                        expired_at = time.monotonic()
                    await self.start_due(webhooks, tasks)
                await self._wait()

    async def _wait(self) -> None:
        """Wait for the next look, or until a try has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._look_interval_s):
                await self._has_room.wait()

    async def expire(self, webhooks: Webhooks) -> None:
        """Give up deliveries that have been due for too long: their endpoint is too slow for all of
        its events. Raises `Unavailable`."""
        if num_dead := await webhooks.expire(time.time() - _MAX_WAIT_S):
            self._metrics.webhooks.labels("dead").inc(num_dead)
            logger.warning("webhooks dead", extra={"deliveries": num_dead, "reason": "not in time"})

    async def start_due(self, webhooks: Webhooks, tasks: asyncio.TaskGroup) -> None:
        """Begin to try due deliveries, as far as there is room. Raises `Unavailable`."""
        while self._running.total() < _MAX_AT_ONCE:
            busy = [one for one, number in self._running.items() if number >= _MAX_OF_ONE]
            delivery = await webhooks.claim(busy, self._lease_s)
            if delivery is None:
                return
            self._running[delivery.webhook.id] += 1
            tasks.create_task(self._try(webhooks, delivery))

    async def _try(self, webhooks: Webhooks, delivery: WebhookDelivery) -> None:
        fields = _fields(delivery)
        try:
            await self._deliver(webhooks, delivery, fields)
        except Unavailable:  # the try's outcome was not written
            logger.warning("webhook is tried again", extra={**fields, "reason": "database"})
        finally:
            self._running[delivery.webhook.id] -= 1
            if not self._running[delivery.webhook.id]:
                del self._running[delivery.webhook.id]
            self._has_room.set()

    async def _deliver(
        self, webhooks: Webhooks, delivery: WebhookDelivery, fields: dict[str, object]
    ) -> None:
        reason = await self._send(delivery, fields)
        if reason is None:
            await webhooks.delivered(delivery)
            self._metrics.webhooks.labels("delivered").inc()
            logger.info("webhook delivered", extra=fields)
            return
        is_dead = delivery.num_tries >= self._max_tries
        retry_at = time.time() + pause_s(delivery.num_tries, self._first_pause_s)
        await webhooks.failed(delivery, reason, None if is_dead else retry_at)
        self._metrics.webhooks.labels("dead" if is_dead else "retried").inc()
        event = "webhook dead" if is_dead else "webhook is tried again"
        logger.warning(event, extra={**fields, "reason": reason})

    async def _send(self, delivery: WebhookDelivery, fields: dict[str, object]) -> str | None:
        """Returns why the endpoint has not accepted the delivery."""
        try:
            status = await self.sender.send(delivery)
        except NotSent as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (one event's bug is one event's failure)
            incidents.report("task", "webhook not sent", error, **fields)
            return "the gateway failed"
        return None if is_success(status) else f"status {status}"


def pause_s(num_tries: int, first_pause_s: float) -> float:
    """Seconds until the next try."""
    return Backoff(first_pause_s, _MAX_PAUSE_S, num_failed=num_tries).drawn_pause_s


def _fields(delivery: WebhookDelivery) -> dict[str, object]:
    return {
        "delivery": delivery.id,
        "webhook": delivery.webhook.id,
        "type": delivery.type,
        "object": delivery.object_id,
        "tries": delivery.num_tries,
    }
