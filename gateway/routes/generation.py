"""POST /v1/chat/completions and /v1/completions."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.body import read_body
from gateway.deps import Gateway
from gateway.formats import AnswerFormat, ChatFormat, CompletionFormat
from gateway.generation import GenerationResponse
from gateway.schemas import ChatRequest, CompletionRequest, parse, to_job


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    async def respond(
        request: Request, body: ChatRequest | CompletionRequest, words: AnswerFormat
    ) -> Response:
        now = time.time()
        job = to_job(
            body,
            request_id=request.state.request_id,
            created_at=now,
            deadline=now + gateway.settings.request_timeout_s,
        )
        with gateway.admission.admit():
            await gateway.workers.require(job.model)
        # After the checks: a bad request takes no spare queue, and no place among the metrics.
        request.state.request_id = gateway.reply_queues.new_id(words.id_kind)
        job = msgspec.structs.replace(job, request_id=request.state.request_id)
        return GenerationResponse(
            gateway, job, words, is_stream=body.stream, include_usage=body.include_usage
        )

    @routes.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, gateway.settings.max_body_bytes)
        return await respond(request, parse(ChatRequest, body), ChatFormat())

    @routes.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(request, gateway.settings.max_body_bytes)
        return await respond(request, parse(CompletionRequest, body), CompletionFormat())

    return routes


def _documented(kind: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
    """The OpenAPI page's view of a body that the handler reads itself, to bound it first."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
