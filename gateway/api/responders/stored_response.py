"""Responses that are there already: read as far as they have come, streamed again, cancelled."""

import asyncio

from gateway.api.render.gathering import Gathering
from gateway.api.render.sse import error_of
from gateway.api.rendering import decode_rendering
from gateway.api.responders import resumption
from gateway.log.cursor import Departure, Item, LogEvent, LogFacts, Restarted
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import Unavailable, WarrenError
from shared.messages import Accepted, Failed

_LOOK_INTERVAL_S = 0.02


async def stored_response(
    gateway: Gateway, request_id: str, tenant: str
) -> tuple[LogFacts, Gathering, WarrenError | None]:
    """What the log of a response has by now, and what the response failed of.

    Raises `StreamNotFound`, `StreamExpired` and `Unavailable`.
    """
    async with gateway.relays.resume(resumption.checked_id(request_id), tenant) as relay:
        relay.close(Departure.LEFT)
        events = await _read_all(relay)
        if relay.facts is None:
            raise Unavailable("No worker has started on this response yet.")
    gathering = Gathering(decode_rendering(relay.facts))
    error = None
    for event in events:
        gathering.read(event)
        if isinstance(event, Failed):
            error = error_of(event)
    return relay.facts, gathering, error


async def _read_all(relay: LogRelay) -> list[LogEvent]:
    catching_up = asyncio.create_task(relay.catch_up(Accepted(body_hash="")))
    items: list[Item] = []
    try:
        # A reader of a log has to take what it passes on, or it stops.
        while not catching_up.done():
            items += await relay.take(_LOOK_INTERVAL_S)
        await catching_up
        items += await relay.take(_LOOK_INTERVAL_S)
    finally:
        catching_up.cancel()
    events: list[LogEvent] = []
    for item in items:
        if isinstance(item, Restarted):
            events.clear()
        else:
            events.append(item)
    return events
