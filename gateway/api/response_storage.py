"""Stores responses: the items before a response, its beginning, and its end.

A response is stored before its job is published, and once more before the client is sent the end of
the answer, so that the client can continue it at once. If the gateway dies before the end,
`gateway.api.abandoned_responses` completes the response.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from gateway.api.bodies.input_items import references, stored_items
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.render.output_items import response_of
from gateway.api.render.responses import ResponseObject
from gateway.intake.admission import BYTES_OF_VALUE, Entry, count_values
from gateway.intake.limits import Grant
from gateway.store.history.conversations import StoredItem, items_of
from gateway.store.history.responses import MAX_CHAIN_LEN, ResponseDraft, ResponseRecord
from gateway.store.state import StoredState
from gateway.store.webhooks import EventType
from gateway.wiring import Gateway
from shared.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    PreviousResponseNotFound,
    QueueDown,
    StreamExpired,
    Unavailable,
)
from shared.messages import MAX_MESSAGES
from shared.off_loop import off_loop
from shared.telemetry import floods, incidents

logger = logging.getLogger(__name__)

_MAX_HISTORY_BYTES = 16 << 20
"""No job can be larger."""
_MAX_WAIT_S = 5.0
"""Seconds for which the end of an answer waits for the database."""
_PATIENCE_S = 60.0
"""Seconds for which writing a response is retried while the database is unavailable."""
_RETRY_PAUSE_S = 1.0
_EVENTS: Mapping[str, EventType] = {
    "completed": "response.completed",
    "failed": "response.failed",
    "cancelled": "response.cancelled",
    "incomplete": "response.incomplete",
}
"""The type of the webhook event at the end of a background response, by the status."""
_Request = TypeVar("_Request", bound=ResponsesRequest)


@dataclass(frozen=True, slots=True)
class _Predecessor:
    """The conversation or response that a response continues."""

    items: Sequence[StoredItem] = ()
    previous_id: str | None = None
    conversation_id: str | None = None
    conversation_end: int | None = None


@dataclass(slots=True)
class ResponseStorage:
    """Stores a response, from its beginning to its end."""

    gateway: Gateway
    tenant: str
    predecessor: _Predecessor
    input: bytes
    """A JSON array of its own items."""
    is_background: bool
    response_id: str = ""
    is_ours: bool = False
    """Whether it was stored here; not for a request that was sent before with the same
    Idempotency-Key."""

    @asynccontextmanager
    async def begin(self, response_id: str, grant: Grant) -> AsyncIterator[None]:
        """Store that the response begins; nothing is left of it if its job is not published in the
        block.

        Raises `StreamExpired` if its Idempotency-Key belongs to a stored answer that has no log any
        more, `BusError` and `Unavailable`.
        """
        self.response_id = response_id
        state = await self.gateway.store.open()
        before = self.predecessor
        draft = ResponseDraft(
            id=response_id,
            tenant=self.tenant,
            created_at=int(time.time()),
            previous_id=before.previous_id,
            conversation_id=before.conversation_id,
            conversation_end=before.conversation_end,
            input=self.input,
            owner=self.gateway.limits.name,
            is_background=self.is_background,
        )
        self.is_ours = await state.responses.begin(draft)
        if not self.is_ours and await num_readers(self.gateway, response_id) is None:
            await self._require_no_answer(state)
            self.is_ours = await state.responses.begin(draft, is_again=True)
        try:
            yield
        finally:
            if not grant.is_published:
                await self.discard()

    async def _require_no_answer(self, state: StoredState) -> None:
        """Raise `StreamExpired` if the response has ended with an answer. A failed request may be
        sent again."""
        record = await state.responses.find(self.tenant, self.response_id)
        if record is None or record.body is None or _OUTPUT.decode(record.body).status == "failed":
            return
        raise StreamExpired(
            f"This Idempotency-Key belongs to the stored response '{self.response_id}'. Retrieve "
            f"it with GET /v1/responses/{self.response_id}.",
        )

    async def discard(self) -> None:
        """Forget the response, which will not end."""
        if self.is_ours:
            try:
                state = await self.gateway.store.open()
                await state.responses.discard(self.tenant, self.response_id)
            except Unavailable:  # it is discarded later, because it has no log
                logger.warning("response not discarded", extra={"request_id": self.response_id})


async def prepare(
    gateway: Gateway, request: ResponsesRequest, tenant: str, entry: Entry
) -> tuple[ResponsesRequest, ResponseStorage | None]:
    """The request with the items before it and the items that it refers to, and the storage of its
    response, if it is to be stored. ``entry`` holds the items until the request ends.

    Raises `InvalidRequest`, `PreviousResponseNotFound`, `NotFound` if there is no such
    conversation, `ContextLengthExceeded` if the conversation before it is too long, `Overloaded`,
    and `Unavailable` without a database or space on its disk, unless the client relies on none.
    """
    is_stored = request.is_stored(default=gateway.settings.store_responses)
    if not is_stored and not request.needs_store:
        return request, None
    try:
        state = await gateway.store.open()
        if is_stored:
            await state.room.space.require()
    except Unavailable as error:
        if request.needs_store:
            raise
        gateway.metrics.responses_stored.labels("refused").inc()
        fields = {"tenant": tenant, "reason": error.message}
        floods.warn(logger, "response not stored", "response not stored", fields, tenant)
        return request, None
    request = await _resolved(state, request, tenant, entry)
    own = await off_loop(partial(stored_items, request.input), entry.num_bytes)
    before = await _predecessor(state, request, tenant, entry)
    request = await _after(before, request, own, entry)
    if not is_stored:
        return request, None
    before = replace(before, items=())  # an answer may take minutes
    own_input = await off_loop(partial(msgspec.json.encode, own), entry.num_bytes)
    return request, ResponseStorage(gateway, tenant, before, own_input, request.background)


async def continued(gateway: Gateway, request: _Request, tenant: str, entry: Entry) -> _Request:
    """The request with the items before it and the items that it refers to, if there are any.
    Raises the errors of `prepare`."""
    if not request.is_continued:
        return request
    state = await gateway.store.open()
    request = await _resolved(state, request, tenant, entry)
    before = await _predecessor(state, request, tenant, entry)
    own = await off_loop(partial(stored_items, request.input), entry.num_bytes)
    return await _after(before, request, own, entry)


async def finish(gateway: Gateway, tenant: str, response: ResponseObject) -> None:
    """Store how a response has ended. A database that is slow is waited for only for a while; the
    answer does not depend on it."""
    # A write that has begun is completed even if the client leaves.
    await gateway.store.write(_write(gateway, tenant, response), _MAX_WAIT_S)


async def num_readers(gateway: Gateway, response_id: str) -> int | None:
    """The readers of a response's log; None if there is no log. Raises `BusError`."""
    log = gateway.reply_queues.named(response_id)
    try:
        await log.find()
        found = await gateway.bus.inspect(log.queue.name)
    except QueueDown:  # its reader begins it again elsewhere, or its node returns
        return 1
    return None if found is None else found.num_consumers


async def input_items(
    gateway: Gateway, tenant: str, record: ResponseRecord, entry: Entry
) -> list[StoredItem]:
    """All items that a response was generated from, the oldest first; ``entry`` holds the items
    that it continues. Raises `NotFound` if some were deleted since, `ContextLengthExceeded`,
    `Overloaded` and `Unavailable`."""
    state = await gateway.store.open()
    items: list[StoredItem] = []
    if record.previous_id is not None:
        items += _items_of(await _chain(state, tenant, record.previous_id, entry.hold))
    elif record.conversation_id is not None:
        history = await state.conversations.history(
            tenant,
            record.conversation_id,
            record.conversation_end,
            max_bytes=_MAX_HISTORY_BYTES,
            hold=entry.hold,
        )
        if history is None:
            raise _too_long()
        items += history[0]
    return items + items_of(record.input)


async def _resolved(state: StoredState, request: _Request, tenant: str, entry: Entry) -> _Request:
    """The request with the output items of stored responses in the places of the references to
    them. Raises `InvalidRequest` if there is no such item, `ContextLengthExceeded` and
    `Overloaded`."""
    ids = references(request.input)
    if not ids:
        return request
    response_ids = {response_id for one in ids.values() if (response_id := response_of(one))}
    bodies = await state.responses.bodies(
        tenant, response_ids, max_bytes=_MAX_HISTORY_BYTES, hold=entry.hold
    )
    if bodies is None:
        raise _too_long()
    outputs = {item.id: item for body in bodies for item in items_of(_OUTPUT.decode(body).output)}
    for item_id in ids.values():
        if item_id not in outputs:
            raise InvalidRequest(f"Item with id '{item_id[:128]}' not found.", param="input")
    named = [outputs[item_id] for item_id in ids.values()]
    num_bytes = sum(len(item.body) for item in named)
    if num_bytes > _MAX_HISTORY_BYTES:  # one may be named many times
        raise _too_long()
    entry.hold(num_bytes)
    items = list(request.input)
    for k, item in zip(ids, await _decoded(named, MAX_MESSAGES, entry), strict=True):
        items[k] = item
    return msgspec.structs.replace(request, input=items)


async def _after(
    before: _Predecessor, request: _Request, own: Sequence[Any], entry: Entry
) -> _Request:
    """Raises `ContextLengthExceeded` and `Overloaded`."""
    if not before.items:
        return request
    history = await _decoded(before.items, MAX_MESSAGES - len(own), entry)
    return msgspec.structs.replace(request, input=[*history, *own])


async def _decoded(items: Sequence[StoredItem], max_items: int, entry: Entry) -> list[Any]:
    """Raises `ContextLengthExceeded` and `Overloaded`."""
    if len(items) > max_items:
        raise _too_long()
    array = b"[%b]" % b",".join([item.body for item in items])
    try:
        num_values = await off_loop(partial(count_values, array), len(array))
    except InvalidRequest:
        raise _too_long() from None
    entry.hold(BYTES_OF_VALUE * num_values)
    history: list[Any] = await off_loop(partial(msgspec.json.decode, array), entry.num_bytes)
    return history


async def _predecessor(
    state: StoredState, request: ResponsesRequest, tenant: str, entry: Entry
) -> _Predecessor:
    def hold(num_bytes: int) -> None:
        entry.hold(2 * num_bytes)  # as it is loaded, and as one array

    if request.previous_response_id is not None:
        return await _previous(state, request.previous_response_id, tenant, hold)
    if request.conversation_id is None:
        return _Predecessor()
    conversation_id = request.conversation_id
    history = await state.conversations.history(
        tenant, conversation_id, max_bytes=_MAX_HISTORY_BYTES, hold=hold
    )
    if history is None:
        raise _too_long()
    items, end = history
    return _Predecessor(items, conversation_id=conversation_id, conversation_end=end)


async def _previous(
    state: StoredState, response_id: str, tenant: str, hold: Callable[[int], None]
) -> _Predecessor:
    try:
        chain = await _chain(state, tenant, response_id, hold)
    except NotFound as error:
        message = f"Previous {error.message[0].lower()}{error.message[1:]}"
        raise PreviousResponseNotFound(message, param="previous_response_id") from None
    if chain[-1].body is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id}' has not ended.",
            param="previous_response_id",
        )
    return _Predecessor(_items_of(chain), previous_id=response_id)


async def _chain(
    state: StoredState, tenant: str, response_id: str, hold: Callable[[int], None]
) -> list[ResponseRecord]:
    """A response and all before it."""
    chain = await state.responses.chain(
        tenant, response_id, max_bytes=_MAX_HISTORY_BYTES, hold=hold
    )
    if chain is None:
        raise _too_long()
    return chain


def _items_of(chain: Sequence[ResponseRecord]) -> list[StoredItem]:
    items: list[StoredItem] = []
    for record in chain:
        items += items_of(record.input)
        if record.body is not None:
            items += items_of(_OUTPUT.decode(record.body).output)
    return items


async def _write(gateway: Gateway, tenant: str, response: ResponseObject) -> None:
    outcome = "failed"
    try:
        if not await _store_end(gateway, tenant, response):
            return
        outcome = "stored"
    except Unavailable as error:
        fields = {"request_id": response.id, "reason": error.message}
        if floods.allows("response not stored", tenant):
            logger.error("response not stored", extra=fields)  # noqa: TRY400 (no bug)
    except Exception as error:  # noqa: BLE001 (the client has its answer)
        incidents.report("request", "response not stored", error, request_id=response.id)
    gateway.metrics.responses_stored.labels(outcome).inc()


async def _store_end(gateway: Gateway, tenant: str, response: ResponseObject) -> bool:
    """End a response in the database; False if it was deleted, or another gateway was faster.
    Raises `Unavailable` after some time."""
    output = [StoredItem(item["id"], msgspec.json.encode(item)) for item in response.output]
    body = msgspec.json.encode(response)
    has_failed = response.status == "failed"
    event = _EVENTS[response.status] if response.background else None
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            state = await gateway.store.open()
            return await state.responses.end(
                tenant, response.id, body, output, has_failed=has_failed, event=event
            )
        except Unavailable:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(_RETRY_PAUSE_S)


def _too_long() -> ContextLengthExceeded:
    return ContextLengthExceeded(
        "The conversation is too long: it has more than "
        f"{MAX_CHAIN_LEN} responses, {MAX_MESSAGES} items or {_MAX_HISTORY_BYTES} bytes.",
        param="input",
    )


class _Output(Struct):
    output: msgspec.Raw
    status: str


_OUTPUT = msgspec.json.Decoder(_Output)
