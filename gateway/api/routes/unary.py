"""POST /tokenize, /detokenize, /v1/embeddings, /v1/score, /v1/rerank, and the endpoints that count
the tokens of a prompt."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Send

from gateway.api.bodies.counting import (
    MessageTokens,
    MessageTokensRequest,
    ResponseTokens,
    ResponseTokensRequest,
)
from gateway.api.bodies.schemas import parse
from gateway.api.bodies.scoring import Ranking, RerankRequest, ScoreRequest, Scores
from gateway.api.bodies.unary import (
    DetokenizeRequest,
    EmbeddingRequest,
    Embeddings,
    PromptText,
    QuickDraft,
    TokenizeRequest,
    Tokens,
)
from gateway.api.openapi import documented
from gateway.api.routes.generation import LiveResponse
from gateway.api.sending import ClientGone, until_disconnect
from gateway.intake.body import parsed, read_body
from gateway.intake.key_file import ApiKey
from gateway.intake.limits import tokens_of_unary
from gateway.wiring import Gateway
from shared import job_lines

QuickRequest: TypeAlias = (
    TokenizeRequest
    | DetokenizeRequest
    | EmbeddingRequest
    | MessageTokensRequest
    | ResponseTokensRequest
    | ScoreRequest
    | RerankRequest
)

_TOKENIZE_EXAMPLE: Mapping[str, Any] = {"model": "smollm2", "prompt": "Once upon a time"}
_DETOKENIZE_EXAMPLE: Mapping[str, Any] = {"model": "smollm2", "tokens": [40, 19, 28]}
_MESSAGE_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
_RESPONSE_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "input": "What is the capital of France?",
}
_EMBEDDING_EXAMPLE: Mapping[str, Any] = {"model": "smollm2", "input": ["one text", "another"]}

_SCORE_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "text_1": "What is the capital of France?",
    "text_2": ["Paris is the capital of France.", "Rome is old."],
}
_RERANK_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "query": "What is the capital of France?",
    "documents": ["Rome is old.", "Paris is the capital of France."],
    "top_n": 1,
}


async def _serve(gateway: Gateway, kind: type[QuickRequest], request: Request, send: Send) -> None:
    with gateway.admission.enter() as entry:
        raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
        body = await parsed(partial(parse, kind), raw_body)
        deadline = time.time() + gateway.settings.request_timeout_s
        model = body.model or gateway.workers.only_model()
        caller: ApiKey = request.state.caller
        caller.require_model(model)
        draft = QuickDraft(model, request.state.request_id, deadline, request.state.tenant)
        # Refuses what is out of its limits before the broker is asked.
        num_tokens = tokens_of_unary(body.job(draft))
        entry.begin()
        served = await gateway.workers.find(model)
        gateway.workers.admit(model)
        body.check(served)
        began = time.monotonic()
        async with gateway.limits.admit(caller, num_tokens) as grant:
            grant.is_published = True
            try:
                async with until_disconnect(request.receive):
                    answered = await body.answer(gateway.quick, draft)
            except ClientGone:
                return
            if isinstance(answered, Embeddings):
                grant.settle(answered.usage.total_tokens)
        response = Response(msgspec.json.encode(answered), media_type="application/json")
        await response(request.scope, request.receive, send)
        facts = {
            "request_id": draft.request_id,
            "model": model,
            "tenant": draft.tenant or None,
            "kind": kind.__name__,
            "status": 200,
            "duration_s": round(time.monotonic() - began, 4),
        }
        job_lines.write("request ended", None, facts)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["quick"])

    @routes.post(
        "/tokenize",
        openapi_extra=documented(TokenizeRequest, _TOKENIZE_EXAMPLE, Tokens, streams=False),
    )
    async def tokenize() -> Response:
        """The token ids of a prompt, or of a conversation in the model's chat template."""
        return LiveResponse(partial(_serve, gateway, TokenizeRequest))

    @routes.post(
        "/detokenize",
        openapi_extra=documented(DetokenizeRequest, _DETOKENIZE_EXAMPLE, PromptText, streams=False),
    )
    async def detokenize() -> Response:
        """The text of token ids."""
        return LiveResponse(partial(_serve, gateway, DetokenizeRequest))

    @routes.post(
        "/v1/embeddings",
        openapi_extra=documented(EmbeddingRequest, _EMBEDDING_EXAMPLE, Embeddings, streams=False),
    )
    async def create_embeddings() -> Response:
        """One vector of length 1 for each text, where the model has them."""
        return LiveResponse(partial(_serve, gateway, EmbeddingRequest))

    @routes.post(
        "/v1/score",
        openapi_extra=documented(ScoreRequest, _SCORE_EXAMPLE, Scores, streams=False),
    )
    async def score() -> Response:
        """The similarity of texts, where the model has embeddings."""
        return LiveResponse(partial(_serve, gateway, ScoreRequest))

    @routes.post("/v2/rerank", include_in_schema=False)  # Cohere's clients
    @routes.post(
        "/v1/rerank",
        openapi_extra=documented(RerankRequest, _RERANK_EXAMPLE, Ranking, streams=False),
    )
    async def rerank() -> Response:
        """Documents, sorted by their similarity to a query, where the model has embeddings."""
        return LiveResponse(partial(_serve, gateway, RerankRequest))

    @routes.post(
        "/v1/messages/count_tokens",
        openapi_extra=documented(
            MessageTokensRequest, _MESSAGE_EXAMPLE, MessageTokens, streams=False
        ),
    )
    async def count_message_tokens() -> Response:
        """The number of tokens of a message's prompt, with Anthropic's Messages API."""
        return LiveResponse(partial(_serve, gateway, MessageTokensRequest))

    @routes.post(
        "/v1/responses/input_tokens",
        openapi_extra=documented(
            ResponseTokensRequest, _RESPONSE_EXAMPLE, ResponseTokens, streams=False
        ),
    )
    async def count_response_tokens() -> Response:
        """The number of tokens of a response's prompt."""
        return LiveResponse(partial(_serve, gateway, ResponseTokensRequest))

    return routes
