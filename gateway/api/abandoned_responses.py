"""Reads the logs of stored responses, and completes the responses that no gateway relays any more.

A response is stored by the gateway that sends its end. If that gateway dies, or the client has left
a response that continues without it, the log has no reader. Every gateway looks for such logs,
reads them, and stores their ends. The exclusive consumer of a log decides between gateways. Each
gateway considers only its own responses and the responses of gateways that are gone: a gateway
exists as long as its exclusive queue.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from gateway.api import response_storage
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.formats import decode_rendering, error_of
from gateway.api.render.responses import ResponseObject, build_response
from gateway.log.cursor import Departure, Item, LogEvent, LogFacts, Restarted
from gateway.log.relay import LogRelay
from gateway.store.history.responses import PendingResponse
from gateway.store.state import StoredState
from gateway.store.webhooks import EventType
from gateway.wiring import Gateway
from shared import topology
from shared.errors import BusError, QueueBusy, QueueDown, Unavailable, WarrenError
from shared.messages import Accepted, Failed
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_TAKE_INTERVAL_S = 0.02
_LOOK_INTERVAL_S = 2.0
_SWEEP_INTERVAL_S = 60.0
_MARGIN_S = 1.0
"""Seconds beyond the grace period, within which the client may return to its gateway."""
_GONE_AFTER_S = 60.0
"""Seconds for which a response may have no log. Its job is published within this time."""
_MAX_IN_PAGE = 1000


class LoggedResponse(NamedTuple):
    """A response as far as its log was read."""

    builder: AnswerBuilder
    error: WarrenError | None
    """The error with which it failed; None if it did not."""

    @property
    def response(self) -> ResponseObject:
        return build_response(self.builder, error=self.error)

    @property
    def cancelled(self) -> ResponseObject:
        """The response if it is cancelled now."""
        return build_response(self.builder, is_cancelled=True)


async def current_response(gateway: Gateway, response_id: str, tenant: str) -> LoggedResponse:
    """A response as its log has it at the moment. Its reader is disconnected.

    Raises `StreamNotFound`, `StreamExpired` and `Unavailable`.
    """
    async with gateway.relays.resume(response_id, tenant) as relay:
        relay.close(Departure.LEFT)
        items = await read_all(relay)
        if relay.facts is None:
            raise Unavailable("No worker has started on this response yet.")
    return _logged(gateway, relay.facts, items)


class ResponseCompleter:
    """Completes the responses that no gateway relays, and deletes expired responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._unread_since: dict[str, float] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run until cancelled. Other gateways then take over the logs that are being read."""
        store = self._gateway.store
        state = await store.wait_open()
        sweep = partial(store.keep_swept, _sweep, _SWEEP_INTERVAL_S)
        sweeping = asyncio.create_task(incidents.keep_running(sweep))
        try:
            while True:
                with suppress(Unavailable, BusError):
                    await self._look(state)
                await asyncio.sleep(_LOOK_INTERVAL_S)
        finally:
            tasks = [sweeping, *self._reading.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _look(self, state: StoredState) -> None:
        """Begin to read the logs that have had no reader for longer than the grace period. Raises
        `Unavailable` and `BusError`."""
        now = time.monotonic()
        patience_s = self._gateway.settings.disconnect_grace_s + _MARGIN_S
        unread: dict[str, float] = {}
        are_there = {self._gateway.limits.name: False}
        """Whether each gateway is alive and completes its own responses, by name; False for this
        gateway."""
        async for response in _pending(state):
            response_id = response.id
            if response_id in self._reading or self._gateway.relays.holds(response_id):
                continue
            if response.owner not in are_there:
                are_there[response.owner] = await self._is_there(response.owner)
            if are_there[response.owner]:
                continue
            num_readers = await response_storage.num_readers(self._gateway, response_id)
            if num_readers:
                continue
            unread[response_id] = self._unread_since.get(response_id, now)
            unread_s = now - unread[response_id]
            if num_readers is None and unread_s >= _GONE_AFTER_S:
                await self._give_up(state, response)
            elif num_readers == 0 and unread_s >= patience_s:
                self._reading[response_id] = asyncio.create_task(self._read(response))
        self._unread_since = unread

    async def _is_there(self, owner: str) -> bool:
        """Whether a gateway is connected. Raises `BusError`."""
        try:
            return await self._gateway.bus.inspect(topology.usage_queue(owner).name) is not None
        except (QueueBusy, QueueDown):
            return True

    async def _give_up(self, state: StoredState, response: PendingResponse) -> None:
        logger.warning("response not stored: its log is gone", extra={"request_id": response.id})
        event: EventType | None = "response.failed" if response.is_background else None
        await state.responses.discard(response.tenant, response.id, event=event)
        self._gateway.metrics.responses_stored.labels("gone").inc()

    async def _read(self, response: PendingResponse) -> None:
        try:
            with incidents.survived("task", "response not completed", request_id=response.id):
                await self._complete(response)
        finally:
            del self._reading[response.id]

    async def _complete(self, response: PendingResponse) -> None:
        """Read a log to its end, unless another reader takes it, and store the response."""
        items: list[Item] = []
        try:
            async with self._gateway.relays.resume(response.id, response.tenant) as relay:
                relay.close(Departure.LEFT)
                while not relay.is_ended:
                    items += await relay.take()
        except WarrenError as error:
            fields = {"request_id": response.id, "reason": error.code}
            logger.debug("response is looked at again", extra=fields)
            return
        if relay.facts is not None:  # otherwise no worker has started on it, and its log expires
            logged = _logged(self._gateway, relay.facts, items)
            await response_storage.finish(self._gateway, response.tenant, logged.response)


async def _sweep(state: StoredState) -> None:
    for space in state.spaces:  # also while nobody stores anything
        await space.look()
    await state.room.sweep()


async def _pending(state: StoredState) -> AsyncIterator[PendingResponse]:
    """All responses of the deployment that have not ended. Raises `Unavailable`."""
    page = await state.responses.pending(_MAX_IN_PAGE)
    while page:
        for response in page:
            yield response
        page = await state.responses.pending(_MAX_IN_PAGE, after=page[-1])


def _logged(gateway: Gateway, facts: LogFacts, items: Sequence[Item]) -> LoggedResponse:
    """The response of a log whose ``items`` were read."""
    events: list[LogEvent] = []
    for item in items:
        if isinstance(item, Restarted):
            events.clear()
        else:
            events.append(item)
    builder = AnswerBuilder(decode_rendering(facts))
    error = None
    for event in events:
        builder.read(event)
        if isinstance(event, Failed):
            error = error_of(event)
    if builder.is_complete:
        builder.issue_receipt(gateway.receipts.sign)
    return LoggedResponse(builder, error)


async def read_all(relay: LogRelay) -> list[Item]:
    """The items that a log has at the moment."""
    catching_up = asyncio.create_task(relay.catch_up(Accepted(body_hash="")))
    items: list[Item] = []
    try:
        # A relay stops reading the log if nothing is taken from it.
        while not catching_up.done():
            items += await relay.take(_TAKE_INTERVAL_S)
        await catching_up
        items += await relay.take(_TAKE_INTERVAL_S)
    finally:
        catching_up.cancel()
    return items
