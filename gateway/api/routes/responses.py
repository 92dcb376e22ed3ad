"""POST /v1/responses, and what is done with a response that is there."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.types import Receive, Scope, Send

from gateway.api.bodies.responses import ResponsesRequest, in_own_words
from gateway.api.bodies.schemas import is_unused, parse
from gateway.api.openapi import answered, documented
from gateway.api.render.responses import Echo, ResponseObject, gathered_response, response_object
from gateway.api.responders import resumption
from gateway.api.responders.generation import LiveResponse, Reading, generate
from gateway.api.responders.stored_response import stored_response
from gateway.log.cursor import NOT_FOUND
from gateway.log.framing import Framer
from gateway.wiring import Gateway
from shared.errors import InvalidRequest, StreamNotFound

_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "input": "What is the capital of France?",
    "temperature": 0,
}
_KIND = "resp"
"""What the ids of responses begin with."""
_RESPONSE_ID = Path(description="The `id` of the response.")


class _InOwnWords(Response):
    """Sends ``answer``, whose errors become a response's."""

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
        """Answer a conversation, in the words of the Responses API."""

        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, _KIND, _read)

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
        """A response that was stored, as far as it has come. Who streams it meanwhile is cut off:
        a response has one reader."""
        tenant = request.state.tenant
        with in_own_words():
            request.state.request_id = _checked(response_id)
            if stream:
                framer = Framer(after_number=starting_after)
                return _InOwnWords(resumption.resume(gateway, response_id, tenant, framer))
            _, gathering, error = await stored_response(gateway, response_id, tenant)
        return _json(gathered_response(gathering, gathering.usage, error=error))

    @routes.post("/v1/responses/{response_id}/cancel", openapi_extra=documents)
    async def cancel_response(request: Request, response_id: str = _RESPONSE_ID) -> Response:
        """Cancel a background response. One that has ended stays as it is."""
        tenant = request.state.tenant
        with in_own_words():
            stored = await stored_response(gateway, _checked(response_id), tenant)
            facts, gathering, error = stored
            if not facts.is_detached:
                raise InvalidRequest("Only background responses can be cancelled.")
            response = gathered_response(gathering, gathering.usage, error=error)
            if response.status in ("queued", "in_progress"):
                await resumption.cancel(gateway, response_id, tenant)
                response = gathered_response(gathering, gathering.usage, is_cancelled=True)
        return _json(response)

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str = _RESPONSE_ID) -> dict[str, Any]:
        """Forget a response."""
        with in_own_words():
            await resumption.cancel(gateway, _checked(response_id), request.state.tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def _read(raw_body: bytes) -> Reading:
    body = parse(ResponsesRequest, raw_body)
    is_awaited = body.stream or not body.background
    promise = None if is_awaited else partial(response_object, status="queued")
    return Reading(body, echoed(body, raw_body), promise, in_own_words)


def echoed(request: ResponsesRequest, body: bytes) -> bytes:
    """What the response repeats, as JSON; ``body`` is the request's."""
    said = msgspec.structs.asdict(msgspec.json.decode(body, type=Echo))
    said = {name: value for name, value in said.items() if not is_unused(value)}
    return msgspec.json.encode(Echo(**{**said, "store": request.detach}))


def _checked(response_id: str) -> str:
    """Raises `StreamNotFound` for what cannot be a response's id."""
    if not response_id.startswith(f"{_KIND}-"):
        raise StreamNotFound(NOT_FOUND)
    return resumption.checked_id(response_id)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
