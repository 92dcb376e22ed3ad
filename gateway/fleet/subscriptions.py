"""A gateway's subscriptions other than replies: workers' announcements and commands to all
gateways."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from shared import incidents, topology
from shared.bus.base import Bus, Message
from shared.bus.subscribe import receive

Handler = Callable[[Message], None]


@asynccontextmanager
async def listening(bus: Bus, on_announcement: Handler, on_command: Handler) -> AsyncIterator[None]:
    """Declare a gateway's queues and pass their messages to the handlers, across reconnects.

    A handler may raise `UndecodableMessage`.
    """
    gateway_id = uuid.uuid4().hex
    listeners = [
        asyncio.create_task(incidents.keep_running(partial(receive, bus, queue, handle)))
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
