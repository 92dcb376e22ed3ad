"""POST /tokenize, /detokenize, /v1/embeddings, /v1/score, /v1/rerank, and the endpoints that count
the tokens of a prompt."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import structs
from starlette.types import Send

from gateway.api import response_storage
from gateway.api.bodies.conversations import in_form
from gateway.api.bodies.counting import (
    MessageTokens,
    MessageTokensRequest,
    ResponseTokens,
    ResponseTokensRequest,
)
from gateway.api.bodies.parsing import parse_with_ignored
from gateway.api.bodies.quick import (
    DetokenizeRequest,
    EmbeddingRequest,
    Embeddings,
    PromptText,
    QuickDraft,
    TokenizeRequest,
    TokenizeResponse,
)
from gateway.api.bodies.scoring import Ranking, RerankRequest, ScoreRequest, Scores
from gateway.api.event_stream import ClientGone, until_disconnect
from gateway.api.openapi import (
    IGNORED_PARAMETERS_HEADER,
    IGNORED_TOOLS_HEADER,
    documented,
    headers_named,
)
from gateway.api.routes.generation import LiveResponse
from gateway.intake.admission import Entry, read_body
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import RequestAttempt
from gateway.wiring import Gateway
from shared.errors import WarrenError
from shared.messages import QuickJob, TokenizeJob
from shared.messages.token_estimates import tokens_of_quick
from shared.off_loop import off_loop
from shared.telemetry import requests

QuickRequest: TypeAlias = (
    TokenizeRequest
    | DetokenizeRequest
    | EmbeddingRequest
    | MessageTokensRequest
    | ResponseTokensRequest
    | ScoreRequest
    | RerankRequest
)

_QUESTION = "What is the capital of France?"


class _Endpoint(NamedTuple):
    path: str
    body: type[QuickRequest]
    answer: type[msgspec.Struct]
    example: Mapping[str, Any]
    """A body; the model is added."""
    description: str


_ENDPOINTS = (
    _Endpoint(
        "/tokenize",
        TokenizeRequest,
        TokenizeResponse,
        {"prompt": "Once upon a time"},
        "The token ids of a prompt, or of a conversation in the model's chat template.",
    ),
    _Endpoint(
        "/detokenize",
        DetokenizeRequest,
        PromptText,
        {"tokens": [40, 19, 28]},
        "The text of token ids.",
    ),
    _Endpoint(
        "/v1/embeddings",
        EmbeddingRequest,
        Embeddings,
        {"input": ["one text", "another"]},
        "One vector of length 1 for each text, if the model has embeddings.",
    ),
    _Endpoint(
        "/v1/score",
        ScoreRequest,
        Scores,
        {"text_1": _QUESTION, "text_2": ["Paris is the capital of France.", "Rome is old."]},
        "The similarity of texts, if the model has embeddings.",
    ),
    _Endpoint(
        "/v1/rerank",
        RerankRequest,
        Ranking,
        {
            "query": _QUESTION,
            "documents": ["Rome is old.", "Paris is the capital of France."],
            "top_n": 1,
        },
        "Documents, sorted by their similarity to a query, if the model has embeddings.",
    ),
    _Endpoint(
        "/v1/messages/count_tokens",
        MessageTokensRequest,
        MessageTokens,
        {"messages": [{"role": "user", "content": _QUESTION}]},
        "The number of tokens of a message's prompt, with Anthropic's Messages API.",
    ),
    _Endpoint(
        "/v1/responses/input_tokens",
        ResponseTokensRequest,
        ResponseTokens,
        {"input": _QUESTION},
        "The number of tokens of a response's prompt.",
    ),
)


async def _serve(gateway: Gateway, kind: type[QuickRequest], request: Request, send: Send) -> None:
    caller: ApiKey = request.state.caller
    with (
        gateway.admission.admit_with_body(request.state.tenant) as entry,
        gateway.limits.attempt(caller) as attempt,
    ):
        raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
        read = partial(parse_with_ignored, kind, raw_body)
        body, ignored = await off_loop(read, entry.num_bytes)
        request.state.ignored_parameters = ignored
        request.state.ignored_tools = getattr(body, "ignored_tools", ())
        model = request.state.model = body.model or gateway.workers.only_model()
        caller.require_model(model)
        if isinstance(body, ResponseTokensRequest):
            body = await response_storage.continued(gateway, body, request.state.tenant, entry)
        await _answer(gateway, entry, attempt, model, body, request, send)


async def _answer(
    gateway: Gateway,
    entry: Entry,
    attempt: RequestAttempt,
    model: str,
    body: QuickRequest,
    request: Request,
    send: Send,
) -> None:
    state, now = request.state, time.time()
    caller: ApiKey = state.caller
    draft = QuickDraft(
        model,
        state.request_id,
        deadline=now + gateway.settings.request_timeout_s,
        tenant=state.tenant,
        key_id=caller.key_id,
        created_at=now,
        trace=requests.inject(),
    )
    job: QuickJob = await off_loop(partial(body.job, draft), entry.num_bytes)
    # A job that exceeds its limits is refused here, before the broker is asked.
    num_tokens = tokens_of_quick(job)
    entry.begin()
    served = await gateway.workers.find(model, may_wait=False)
    gateway.workers.require_short_wait(model)
    body.check(served)
    if served is not None and isinstance(job, TokenizeJob):
        formed = await off_loop(partial(in_form, job.prompt, served.tool_parser), entry.num_bytes)
        job = structs.replace(job, prompt=formed)
    began = time.monotonic()
    async with gateway.limits.admit(caller, num_tokens) as grant:
        attempt.is_admitted = True
        grant.note_published()
        # The job goes on without its client, and counts until it is answered.
        watch = nullcontext() if caller.counts_jobs else until_disconnect(request.receive)
        try:
            async with watch:
                answered = await body.answer(gateway.quick, job)
        except ClientGone:
            return
        except WarrenError:
            grant.settle(0)
            raise
        if isinstance(answered, Embeddings | Scores | Ranking):
            grant.settle(answered.usage.total_tokens)
    response = Response(msgspec.json.encode(answered), media_type="application/json")
    await response(request.scope, request.receive, send)
    fields = {
        "kind": type(body).__name__,
        "status": 200,
        "duration_s": round(time.monotonic() - began, 4),
    }
    requests.write_line("request ended", job, fields)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["quick"])
    for endpoint in _ENDPOINTS:
        _add(routes, gateway, endpoint)
    return routes


def _add(routes: APIRouter, gateway: Gateway, endpoint: _Endpoint) -> None:
    async def answer() -> Response:
        return LiveResponse(partial(_serve, gateway, endpoint.body))

    example = {"model": "smollm2", **endpoint.example}
    document = documented(endpoint.body, example, endpoint.answer, streams=False)
    headers = [IGNORED_PARAMETERS_HEADER]
    if issubclass(endpoint.body, MessageTokensRequest | ResponseTokensRequest):
        headers.insert(0, IGNORED_TOOLS_HEADER)
    document["responses"]["200"]["headers"] = headers_named(*headers)
    routes.add_api_route(
        endpoint.path,
        answer,
        name=endpoint.path.removeprefix("/v1").strip("/").replace("/", "_"),
        methods=["POST"],
        description=endpoint.description,
        openapi_extra=document,
    )
    if endpoint.body is RerankRequest:  # Cohere's clients
        routes.add_api_route("/v2/rerank", answer, methods=["POST"], include_in_schema=False)
