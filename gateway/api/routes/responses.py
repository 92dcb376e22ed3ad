"""POST /v1/responses; reading, streaming, cancelling and deleting a stored response."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.types import Receive, Scope, Send

from gateway.api.bodies.responses import ResponsesRequest, in_own_words
from gateway.api.bodies.schemas import is_unused, parse
from gateway.api.openapi import answered, documented
from gateway.api.render.formats import error_of
from gateway.api.render.gathering import Gathering
from gateway.api.render.responses import Echo, ResponseObject, gathered_response, response_object
from gateway.api.rendering import decode_rendering
from gateway.api.routes.generation import LiveResponse, Reading, generate
from gateway.api.routes.streams import ResumedStream, checked_id
from gateway.log.cursor import NOT_FOUND, Departure, Item, LogEvent, LogFacts, Restarted
from gateway.log.framing import Framer
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import InvalidRequest, StreamNotFound, Unavailable, WarrenError
from shared.messages import Accepted, Failed

_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "input": "What is the capital of France?",
    "temperature": 0,
}
_KIND = "resp"
"""The prefix of the ids of responses."""
_LOOK_INTERVAL_S = 0.02
_RESPONSE_ID = Path(description="The `id` of the response.")


class _InOwnWords(Response):
    """Sends ``answer``, and raises its errors in the terms of the Responses API."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with in_own_words():
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
            await generate(gateway, request, send, _KIND, read_response)

        return LiveResponse(serve)

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
        """Get a stored response as it is at the moment. A response has one reader: a client that is
        streaming it is disconnected."""
        tenant = request.state.tenant
        with in_own_words():
            request.state.request_id = _checked(response_id)
            if stream:
                framer = Framer(after_number=starting_after)
                return _InOwnWords(ResumedStream(gateway, response_id, tenant, framer))
            _, gathering, error = await _stored_response(gateway, response_id, tenant)
        return _json(gathered_response(gathering, gathering.usage, error=error))

    @routes.post("/v1/responses/{response_id}/cancel", openapi_extra=documents)
    async def cancel_response(request: Request, response_id: str = _RESPONSE_ID) -> Response:
        """Cancel a background response. A response that has ended stays unchanged."""
        tenant = request.state.tenant
        with in_own_words():
            stored = await _stored_response(gateway, _checked(response_id), tenant)
            facts, gathering, error = stored
            if not facts.is_detached:
                raise InvalidRequest("Only background responses can be cancelled.")
            response = gathered_response(gathering, gathering.usage, error=error)
            if response.status in ("queued", "in_progress"):
                await gateway.cancel(response_id, tenant)
                response = gathered_response(gathering, gathering.usage, is_cancelled=True)
        return _json(response)

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str = _RESPONSE_ID) -> dict[str, Any]:
        """Delete a response."""
        with in_own_words():
            await gateway.cancel(_checked(response_id), request.state.tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def read_response(raw_body: bytes) -> Reading:
    """Raises `InvalidRequest` and `ModelNotFound`."""
    body = parse(ResponsesRequest, raw_body)
    is_awaited = body.stream or not body.background
    promise = None if is_awaited else partial(response_object, status="queued")
    return Reading(body, echoed(body, raw_body), promise, in_own_words)


def echoed(request: ResponsesRequest, body: bytes) -> bytes:
    """The fields of the request's ``body`` that the response repeats, as JSON."""
    said = msgspec.structs.asdict(msgspec.json.decode(body, type=Echo))
    said = {name: value for name, value in said.items() if not is_unused(value)}
    return msgspec.json.encode(Echo(**{**said, "store": request.detach}))


def _checked(response_id: str) -> str:
    """Return the id if it can be that of a response. Raises `StreamNotFound`."""
    if not response_id.startswith(f"{_KIND}-"):
        raise StreamNotFound(NOT_FOUND)
    return checked_id(response_id)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _stored_response(
    gateway: Gateway, request_id: str, tenant: str
) -> tuple[LogFacts, Gathering, WarrenError | None]:
    """The current state of a response's log, and the error if the response failed.

    Raises `StreamNotFound`, `StreamExpired` and `Unavailable`.
    """
    async with gateway.relays.resume(request_id, tenant) as relay:
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
        # A relay stops reading the log if nothing is taken from it.
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
