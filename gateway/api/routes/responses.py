"""POST /v1/responses; reading, streaming, cancelling and deleting a stored response.

A response that has ended is read from the database, and a running response from its log.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from gateway.api import response_storage
from gateway.api.abandoned_responses import LoggedResponse, current_response
from gateway.api.bodies.parsing import MAX_DEPTH, check_json, is_unused, parse_with_ignored
from gateway.api.bodies.responses import ResponsesRequest, with_response_errors
from gateway.api.openapi import answered, documented
from gateway.api.render.responses import Echo, ResponseObject, response_object
from gateway.api.response_storage import ResponseStorage
from gateway.api.routes import json_response
from gateway.api.routes.conversations import AFTER, LIMIT, ORDER, ItemList, item_list
from gateway.api.routes.generation import LiveResponse, ParsedRequest, admitted, generate
from gateway.api.routes.streams import ResumedStream, checked_id
from gateway.api.truncation import truncated
from gateway.intake.admission import Entry
from gateway.log.framing import Framer
from gateway.store.history.conversations import StoredItem
from gateway.store.history.responses import ResponseRecord, not_found
from gateway.wiring import Gateway
from shared.errors import InvalidRequest, NotFound, StreamExpired, StreamNotFound, Unavailable
from shared.messages import GenerationJob

_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "input": "What is the capital of France?",
    "temperature": 0,
}
_PREFIX = "resp_"
_MAX_ECHOED_DEPTH = 2 * MAX_DEPTH
_MAX_LISTED = 100
_RESPONSE_ID = Path(description="The `id` of the response.")


class ParsedResponsesRequest(ParsedRequest):
    """A parsed body of the Responses API."""

    async def load_history(
        self, gateway: Gateway, tenant: str, entry: Entry
    ) -> tuple[ParsedRequest, ResponseStorage | None]:
        assert isinstance(self.body, ResponsesRequest)
        body, storage = await response_storage.prepare(gateway, self.body, tenant, entry)
        return self._replace(body=body), storage

    async def truncate_prompt(self, gateway: Gateway, job: GenerationJob) -> GenerationJob:
        assert isinstance(self.body, ResponsesRequest)
        if self.body.truncation != "auto":
            return job
        # A background job has a later deadline.
        deadline = job.created_at + gateway.settings.request_timeout_s
        return await truncated(gateway.quick, job, deadline)


class ListedResponse(Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    id: str
    created_at: int


class ResponseList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    data: Sequence[ListedResponse]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _WithResponseErrors(Response):
    """Sends ``answer``, and raises its errors in the terms of the Responses API."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with with_response_errors():
            await self._answer(scope, receive, send)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["responses"])
    documents: dict[str, Any] = {"responses": {"200": answered(ResponseObject)}}

    @routes.post(
        "/v1/responses",
        openapi_extra=documented(ResponsesRequest, _EXAMPLE, ResponseObject, streams=True),
    )
    async def create_response() -> Response:
        """Answer a conversation, with the Responses API."""

        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, _PREFIX, read_response)

        return LiveResponse(serve)

    @routes.get("/v1/responses", openapi_extra={"responses": {"200": answered(ResponseList)}})
    async def list_responses(
        after: str | None = Query(None, description="The id after which the page begins."),
        limit: int = Query(20, ge=1, le=_MAX_LISTED, description="The size of a page."),
    ) -> Response:
        """List the stored responses that have ended, newest first, by their ids. An extension of
        Warren."""
        return admitted(gateway, partial(_page, gateway, after, limit))

    @routes.get(
        "/v1/responses/{response_id}",
        openapi_extra=documents,
        response_class=Response,
        responses={204: {"description": "There is nothing more."}},
    )
    async def get_response(
        request: Request,
        response_id: str = _RESPONSE_ID,
        stream: bool = Query(False, description="Whether to stream the response's events."),
        starting_after: int = Query(
            -1,
            ge=-1,
            description="With `stream`: the `sequence_number` of the last event that was received.",
        ),
    ) -> Response:
        """Get a stored response as it is at the moment. A running response has a single reader, so
        a client that is streaming it is disconnected."""
        tenant = request.state.tenant
        request.state.request_id = _checked(response_id)
        if stream:
            framer = Framer(after_number=starting_after)
            return _WithResponseErrors(ResumedStream(gateway, response_id, tenant, framer))
        return admitted(gateway, partial(_current_answer, gateway, response_id))

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        openapi_extra={"responses": {"200": answered(ItemList)}},
    )
    async def list_input_items(
        response_id: str = _RESPONSE_ID,
        after: str | None = AFTER,
        limit: int = LIMIT,
        order: Literal["asc", "desc"] = ORDER,
    ) -> Response:
        """List the items that a stored response was generated from: the items that it continues,
        and its own items."""

        async def serve(request: Request, send: Send) -> None:
            tenant = request.state.tenant
            with gateway.admission.admit_without_body(tenant) as entry:
                items = await _input_items(
                    gateway, _checked(response_id), tenant, after, order, entry
                )
                answer = json_response(item_list(items[:limit], has_more=len(items) > limit))
                del items
                entry.hold(len(answer.body))
                await answer(request.scope, request.receive, send)

        return LiveResponse(serve)

    @routes.post("/v1/responses/{response_id}/cancel", openapi_extra=documents)
    async def cancel_response(request: Request, response_id: str = _RESPONSE_ID) -> Response:
        """Cancel a background response. A response that has ended stays unchanged."""
        return json_response(await _cancel(gateway, _checked(response_id), request.state.tenant))

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str = _RESPONSE_ID) -> dict[str, Any]:
        """Delete a response. A running response is cancelled."""
        await _delete(gateway, _checked(response_id), request.state.tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def read_response(raw_body: bytes) -> ParsedRequest:
    """Raises `InvalidRequest` and `ModelNotFound`."""
    body, ignored = parse_with_ignored(ResponsesRequest, raw_body)
    is_awaited = body.stream or not body.background
    background_answer = None if is_awaited else partial(response_object, status="queued")
    return ParsedResponsesRequest(
        body, echoed(raw_body), background_answer, with_response_errors, ignored
    )


def echoed(body: bytes) -> bytes:
    """The fields of the request's ``body`` that the response repeats, as JSON. Raises
    `InvalidRequest` if a field is nested too deeply to be decoded in any place."""
    said = msgspec.structs.asdict(msgspec.json.decode(body, type=Echo))
    said = {name: value for name, value in said.items() if not is_unused(value)}
    for name, value in said.items():
        check_json(value, name, _MAX_ECHOED_DEPTH)
    if isinstance(said.get("conversation"), str):
        said["conversation"] = {"id": said["conversation"]}
    if isinstance(said.get("tools"), list):
        said["tools"] = [_whole_tool(tool) for tool in said["tools"]]
    match said.get("tool_choice"):
        case {"function": {"name": name}}:  # as in a chat
            said["tool_choice"] = {"type": "function", "name": name}
    return msgspec.json.encode(Echo(**said))


def _whole_tool(tool: Any) -> Any:
    """A function with all that OpenAI's type requires; other tools are repeated as they are."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        return {"parameters": None, "strict": None, **tool}
    return tool


def _checked(response_id: str) -> str:
    """Return the id if it can be the id of a response. Raises `NotFound`."""
    try:
        if response_id.startswith(_PREFIX):
            return checked_id(response_id)
    except StreamNotFound:
        pass
    raise not_found(response_id)


async def _page(gateway: Gateway, after: str | None, limit: int, request: Request) -> Response:
    """The list from after the response with the id ``after``. Raises `NotFound` and
    `Unavailable`."""
    state = await gateway.store.open()
    found = await state.responses.ended(request.state.tenant, after=after, limit=limit + 1)
    page = [ListedResponse(**one._asdict()) for one in found[:limit]]
    return json_response(
        ResponseList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(found) > limit,
        )
    )


def _is_unended(response: ResponseObject) -> bool:
    return response.status in ("queued", "in_progress")


async def _current_answer(gateway: Gateway, response_id: str, request: Request) -> Response:
    """Raises as `_current`."""
    current = await _current(gateway, response_id, request.state.tenant)
    return json_response(current.response if isinstance(current, LoggedResponse) else current)


async def _current(gateway: Gateway, response_id: str, tenant: str) -> msgspec.Raw | LoggedResponse:
    """A response as it is stored or, if it has not ended or is not stored, as its log has it.

    Raises `NotFound`, and `Unavailable`, also if there is no log and the database is unreachable.
    """
    trouble, record = None, None
    try:
        record = await _stored(gateway, response_id, tenant)
    except Unavailable as error:
        trouble = error
    if record is not None and record.body is not None:
        return msgspec.Raw(record.body)
    try:
        current = await current_response(gateway, response_id, tenant)
    except (StreamNotFound, StreamExpired):
        if trouble is not None:
            raise trouble from None
        # It may have ended since it was looked up.
        record = await _stored(gateway, response_id, tenant)
        if record is None or record.body is None:
            raise not_found(response_id) from None
        return msgspec.Raw(record.body)
    if record is not None and not _is_unended(current.response):
        await response_storage.finish(gateway, tenant, current.response)
    return current


async def _stored(gateway: Gateway, response_id: str, tenant: str) -> ResponseRecord | None:
    state = await gateway.store.open()
    return await state.responses.find(tenant, response_id)


async def _input_items(
    gateway: Gateway,
    response_id: str,
    tenant: str,
    after: str | None,
    order: Literal["asc", "desc"],
    entry: Entry,
) -> list[StoredItem]:
    """The items that follow the item with the id ``after``. Raises `NotFound`, `Overloaded` and
    `Unavailable`."""
    record = await _stored(gateway, response_id, tenant)
    if record is None:
        raise not_found(response_id)
    items = await response_storage.input_items(gateway, tenant, record, entry)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"Item with id '{after[:128]}' not found.", param="after")
    return items if after is None else items[ids.index(after) + 1 :]


async def _cancel(gateway: Gateway, response_id: str, tenant: str) -> ResponseObject:
    """Raises `InvalidRequest`, `NotFound` and `Unavailable`."""
    current = await _current(gateway, response_id, tenant)
    if isinstance(current, LoggedResponse):
        response = current.response
    else:
        response = msgspec.json.decode(current, type=ResponseObject)
    if not response.background:
        raise InvalidRequest("Only background responses can be cancelled.")
    if isinstance(current, LoggedResponse) and _is_unended(response):
        await gateway.cancel(response_id, tenant)
        response = current.cancelled
        await response_storage.finish(gateway, tenant, response)
    return response


async def _delete(gateway: Gateway, response_id: str, tenant: str) -> None:
    """Delete the stored data of a response, and cancel it. Raises `NotFound` and `Unavailable`."""
    has_log = True
    try:
        await gateway.cancel(response_id, tenant)
    except (StreamNotFound, StreamExpired):
        has_log = False
    state = await gateway.store.open()
    was_stored = await state.responses.delete(tenant, response_id)
    if not has_log and not was_stored:
        raise not_found(response_id)
