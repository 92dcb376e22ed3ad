"""POST /v1/chat/completions and /v1/completions."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.api.bodies.schemas import ChatRequest, CompletionRequest, parse
from gateway.api.openapi import documented
from gateway.api.render.formats import ChatCompletion, Completion
from gateway.api.responders.generation_response import GenerationResponse
from gateway.api.submission import draft_of, received, submitted
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

    async def answer(
        request: Request, kind: type[ChatRequest | CompletionRequest], id_kind: str
    ) -> Response:
        raw_body = await received(gateway, request)
        draft = draft_of(gateway, request, parse(kind, raw_body))
        submission = await submitted(gateway, request, draft, raw_body, id_kind)
        return GenerationResponse(gateway, submission)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=documented(ChatRequest, _CHAT_EXAMPLE, ChatCompletion, streams=True),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, ChatRequest, "chatcmpl")

    @routes.post(
        "/v1/completions",
        openapi_extra=documented(CompletionRequest, _COMPLETION_EXAMPLE, Completion, streams=True),
    )
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        return await answer(request, CompletionRequest, "cmpl")

    return routes
