"""POST /v1/chat/completions and /v1/completions."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Send

from gateway.api.bodies.schemas import ChatRequest, CompletionRequest, parse
from gateway.api.openapi import documented
from gateway.api.render.formats import ChatCompletion, Completion
from gateway.api.responders.generation import LiveResponse, Reading, generate
from gateway.wiring import Gateway

_CHAT_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}
_COMPLETION_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "prompt": "Once upon a time",
    "max_tokens": 16,
}


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    def answer(kind: type[ChatRequest | CompletionRequest], id_kind: str) -> Response:
        def read(raw_body: bytes) -> Reading:
            return Reading(parse(kind, raw_body))

        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, id_kind, read)

        return LiveResponse(serve)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=documented(ChatRequest, _CHAT_EXAMPLE, ChatCompletion, streams=True),
    )
    async def create_chat_completion() -> Response:
        """Answer a conversation."""
        return answer(ChatRequest, "chatcmpl")

    @routes.post(
        "/v1/completions",
        openapi_extra=documented(CompletionRequest, _COMPLETION_EXAMPLE, Completion, streams=True),
    )
    async def create_completion() -> Response:
        """Continue one or several prompts."""
        return answer(CompletionRequest, "cmpl")

    return routes
