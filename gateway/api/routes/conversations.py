"""/v1/conversations: lists of items that responses continue."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.input_items import stored_items
from gateway.api.bodies.parsing import Body, parse
from gateway.api.openapi import answered, documented
from gateway.api.routes import json_response
from gateway.api.routes.generation import admitted
from gateway.intake.admission import read_body
from gateway.store.history.conversations import ConversationRecord, StoredItem
from gateway.wiring import Gateway
from shared.off_loop import off_loop

_MAX_ITEMS_AT_ONCE = 20
_MAX_LISTED = 100
_ITEM_EXAMPLE: Mapping[str, Any] = {"role": "user", "content": "What is the capital of France?"}
_CONVERSATION_ID = Path(description="The `id` of the conversation.")
_ITEM_ID = Path(description="The `id` of the item.")

AFTER = Query(None, description="The id of the item after which the page begins.")
LIMIT = Query(20, ge=1, le=_MAX_LISTED, description="The size of a page.")
ORDER = Query("desc", description="`desc`: the newest first.")

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Items = Annotated[
    list[Any],
    Meta(
        max_length=_MAX_ITEMS_AT_ONCE, description="Messages, calls, their outputs, and reasoning."
    ),
]


class NewConversation(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/conversations``."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationChange(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/conversations/{conversation_id}``."""

    metadata: Metadata | None


class NewItems(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/conversations/{conversation_id}/items``."""

    items: Items


_Items = TypeVar("_Items", NewConversation, NewItems)
_Result = TypeVar("_Result")


class ConversationAnswer(Struct, frozen=True, kw_only=True, tag_field="object", tag="conversation"):
    id: str
    created_at: int
    metadata: Mapping[str, str]


class ItemList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """A page of items. The ids of an empty page are empty."""

    data: Sequence[msgspec.Raw]
    first_id: str
    last_id: str
    has_more: bool


def item_list(page: Sequence[StoredItem], *, has_more: bool) -> ItemList:
    return ItemList(
        data=[msgspec.Raw(item.body) for item in page],
        first_id=page[0].id if page else "",
        last_id=page[-1].id if page else "",
        has_more=has_more,
    )


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["conversations"])
    documents: dict[str, Any] = {"responses": {"200": answered(ConversationAnswer)}}
    documents_list: dict[str, Any] = {"responses": {"200": answered(ItemList)}}
    example = {"items": [_ITEM_EXAMPLE]}

    async def read_off_loop(request: Request, read: Callable[[bytes], _Result]) -> _Result:
        with gateway.admission.admit_with_body(request.state.tenant) as entry:
            raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
            return await off_loop(partial(read, raw_body), entry.num_bytes)

    @routes.post(
        "/v1/conversations",
        openapi_extra=documented(NewConversation, example, ConversationAnswer, streams=False),
    )
    async def create_conversation(request: Request) -> Response:
        """Create a conversation."""
        body, items = await read_off_loop(request, partial(_with_items, NewConversation))
        state = await gateway.store.open()
        tenant = request.state.tenant
        return _described(await state.conversations.create(tenant, body.metadata or {}, items))

    @routes.get("/v1/conversations/{conversation_id}", openapi_extra=documents)
    async def get_conversation(
        request: Request, conversation_id: str = _CONVERSATION_ID
    ) -> Response:
        """Describe a conversation."""
        state = await gateway.store.open()
        return _described(await state.conversations.get(request.state.tenant, conversation_id))

    @routes.post(
        "/v1/conversations/{conversation_id}",
        openapi_extra=documented(
            ConversationChange, {"metadata": {"topic": "travel"}}, ConversationAnswer, streams=False
        ),
    )
    async def update_conversation(
        request: Request, conversation_id: str = _CONVERSATION_ID
    ) -> Response:
        """Replace the metadata of a conversation."""
        body = await read_off_loop(request, partial(parse, ConversationChange))
        state = await gateway.store.open()
        tenant, metadata = request.state.tenant, body.metadata or {}
        return _described(await state.conversations.update(tenant, conversation_id, metadata))

    @routes.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(
        request: Request, conversation_id: str = _CONVERSATION_ID
    ) -> dict[str, Any]:
        """Delete a conversation with its items. Its responses are kept."""
        state = await gateway.store.open()
        await state.conversations.delete(request.state.tenant, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.post(
        "/v1/conversations/{conversation_id}/items",
        openapi_extra=documented(NewItems, example, ItemList, streams=False),
    )
    async def create_items(request: Request, conversation_id: str = _CONVERSATION_ID) -> Response:
        """Add items at the end of a conversation."""
        _, items = await read_off_loop(request, partial(_with_items, NewItems))
        state = await gateway.store.open()
        await state.conversations.add(request.state.tenant, conversation_id, items)
        return json_response(item_list(items, has_more=False))

    @routes.get("/v1/conversations/{conversation_id}/items", openapi_extra=documents_list)
    async def list_items(
        conversation_id: str = _CONVERSATION_ID,
        after: str | None = AFTER,
        limit: int = LIMIT,
        order: Literal["asc", "desc"] = ORDER,
    ) -> Response:
        """List the items of a conversation, up to 16 MiB of them."""
        return admitted(
            gateway, partial(_page, gateway, conversation_id, after, limit, order == "desc")
        )

    @routes.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def get_item(
        conversation_id: str = _CONVERSATION_ID, item_id: str = _ITEM_ID
    ) -> Response:
        """Return an item of a conversation."""
        return admitted(gateway, partial(_item, gateway, conversation_id, item_id))

    @routes.delete("/v1/conversations/{conversation_id}/items/{item_id}", openapi_extra=documents)
    async def delete_item(
        request: Request, conversation_id: str = _CONVERSATION_ID, item_id: str = _ITEM_ID
    ) -> Response:
        """Delete an item of a conversation. Returns the conversation."""
        state = await gateway.store.open()
        tenant = request.state.tenant
        return _described(await state.conversations.delete_item(tenant, conversation_id, item_id))

    return routes


async def _page(
    gateway: Gateway,
    conversation_id: str,
    after: str | None,
    limit: int,
    newest_first: bool,
    request: Request,
) -> Response:
    """Raises `NotFound` and `Unavailable`."""
    state = await gateway.store.open()
    page, has_more = await state.conversations.page(
        request.state.tenant, conversation_id, after=after, limit=limit, newest_first=newest_first
    )
    return json_response(item_list(page, has_more=has_more))


async def _item(gateway: Gateway, conversation_id: str, item_id: str, request: Request) -> Response:
    """Raises `NotFound` and `Unavailable`."""
    state = await gateway.store.open()
    item = await state.conversations.item(request.state.tenant, conversation_id, item_id)
    return Response(item.body, media_type="application/json")


def _with_items(kind: type[_Items], raw_body: bytes) -> tuple[_Items, list[StoredItem]]:
    """The body, and its items as they are stored. Raises `InvalidRequest`."""
    body = parse(kind, raw_body)
    return body, _encoded(stored_items(body.items or [], "items"))


def _encoded(items: Sequence[Mapping[str, Any]]) -> list[StoredItem]:
    return [StoredItem(item["id"], msgspec.json.encode(item)) for item in items]


def _described(record: ConversationRecord) -> Response:
    return json_response(
        ConversationAnswer(id=record.id, created_at=record.created_at, metadata=record.metadata)
    )
