"""A gateway's subscriptions other than replies: workers' announcements and commands to all
gateways."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared import incidents, topology
from shared.bus.base import Bus, Message, Queue
from shared.errors import BusError, UndecodableMessage

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.2

Handler = Callable[[Message], None]


@asynccontextmanager
async def listening(bus: Bus, on_announcement: Handler, on_command: Handler) -> AsyncIterator[None]:
    """Declare a gateway's queues and pass their messages to the handlers, across reconnects.

    A handler may raise `UndecodableMessage`.
    """
    gateway_id = uuid.uuid4().hex
    listeners = [
        asyncio.create_task(_listen(bus, gateway_id, queue, handle))
        for queue, handle in (
            (topology.announcements_queue(gateway_id), on_announcement),
            (topology.gateway_queue(gateway_id), on_command),
        )
    ]
    try:
        yield
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.wait(listeners)


async def _listen(bus: Bus, gateway_id: str, queue: Queue, handle: Handler) -> None:
    while True:
        try:
            await bus.wait_connected()
            await topology.declare_gateway(bus, gateway_id)
            async with bus.consume(queue.name) as consumer:
                async for delivery in consumer:
                    await delivery.ack()
                    _handle(delivery.message, handle)
        except BusError as error:
            logger.warning(
                "subscription failed, retrying",
                extra={"queue": queue.name, "reason": error.message},
            )
            await asyncio.sleep(_RETRY_PAUSE_S)
        except Exception as error:  # noqa: BLE001 (the subscription must survive)
            incidents.report("task", "listening again", error, queue=queue.name)
            await asyncio.sleep(_RETRY_PAUSE_S)


def _handle(message: Message, handle: Handler) -> None:
    with incidents.survived("task", "message not handled"):
        try:
            handle(message)
        except UndecodableMessage as error:
            logger.warning("undecodable message dropped", extra={"reason": error.message})
