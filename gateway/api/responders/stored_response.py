"""Responses that are there already: read as far as they have come, streamed again, cancelled."""

import asyncio
from collections.abc import Sequence

from gateway.api.render.framing import Framer
from gateway.api.render.gathering import Gathering
from gateway.api.render.sse import Payload, error_of
from gateway.api.responders import resumption
from gateway.log.fate import Departure
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import Unavailable, WarrenError
from shared.log import Relay
from shared.messages import Accepted, Failed

_LOOK_INTERVAL_S = 0.02


class SequenceFramer(Framer):
    """Frames the events of a response whose ``sequence_number`` is beyond ``after``.

    The number counts events, as the Responses API wants it: where a broker lost a log's end, and it
    was written again in other pieces, it is a ``Last-Event-ID`` that is exact.
    """

    def __init__(self, after: int) -> None:
        super().__init__()
        self._num_to_skip = after + 1

    def frame_between(self, payloads: Sequence[Payload]) -> bytes:
        return super().frame_between(self._rest(payloads))

    def _frame_news(self, payloads: Sequence[Payload]) -> bytes:
        return super()._frame_news(self._rest(payloads))

    def _rest(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        num_skipped = min(self._num_to_skip, len(payloads))
        self._num_to_skip -= num_skipped
        self._num_payloads += num_skipped
        return payloads[num_skipped:]


async def stored_response(
    gateway: Gateway, request_id: str, tenant: str
) -> tuple[Gathering, WarrenError | None]:
    """What the log of a response has by now, and what the response failed of.

    Raises `StreamNotFound`, `StreamExpired` and `Unavailable`.
    """
    async with gateway.relays.resume(resumption.checked_id(request_id), tenant) as relay:
        relay.close(Departure.LEFT)
        relays = await _read_all(relay)
        if relay.context is None:
            raise Unavailable("No worker has started on this response yet.")
    gathering = Gathering(relay.context)
    error = None
    for one in relays:
        gathering.read(one)
        if isinstance(one.event, Failed):
            error = error_of(one.event)
    return gathering, error


async def _read_all(relay: LogRelay) -> list[Relay]:
    catching_up = asyncio.create_task(relay.catch_up(Accepted(body_hash="")))
    relays: list[Relay] = []
    try:
        # Who reads a log has to take what it passes on, or it stops.
        while not catching_up.done():
            relays += await relay.take(_LOOK_INTERVAL_S)
        await catching_up
        return relays + await relay.take(_LOOK_INTERVAL_S)
    finally:
        catching_up.cancel()
