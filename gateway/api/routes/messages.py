"""POST /v1/messages: Anthropic's Messages API."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Send

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.openapi import documented
from gateway.api.render.messages import AnswerMessage
from gateway.api.routes.generation import LiveResponse, ParsedRequest, generate
from gateway.wiring import Gateway

_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["messages"])

    @routes.post(
        "/v1/messages",
        openapi_extra=documented(MessagesRequest, _EXAMPLE, AnswerMessage, streams=True),
    )
    async def create_message() -> Response:
        """Answer a conversation, with Anthropic's Messages API."""

        async def serve(request: Request, send: Send) -> None:
            read = partial(ParsedRequest.of, MessagesRequest)
            await generate(gateway, request, send, "msg_", read)

        return LiveResponse(serve)

    return routes
