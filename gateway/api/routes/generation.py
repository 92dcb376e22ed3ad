"""POST /v1/chat/completions and /v1/completions; serves a generation from the request's body to the
last byte of its answer, in one coroutine."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from gateway.api import keeping
from gateway.api.bodies.parsing import parse_with_ignored
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import GenerationBody, Submission, submission
from gateway.api.event_stream import (
    STREAM_HEADERS,
    ClientGone,
    EventStream,
    raise_failure,
    rendering_in,
    require_client,
    send_last,
    until_disconnect,
)
from gateway.api.keeping import Keeping
from gateway.api.observation import Observation
from gateway.api.openapi import documented
from gateway.api.render import whole_answer
from gateway.api.render.formats import ChatCompletion, Completion, Rendering
from gateway.api.render.gathering import Gathering
from gateway.api.render.responses import ResponseObject
from gateway.api.truncation import truncated
from gateway.intake.admission import parsed, read_body
from gateway.intake.api_keys import ApiKey
from gateway.intake.limits import Grant, tokens_of
from gateway.intake.signer import KEY_HEADER, Verb, check_key, hash_body
from gateway.log.cursor import Departure, Fate, Restarted
from gateway.log.framing import Framer
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog, new_id
from gateway.wiring import Gateway
from shared.errors import WarrenError
from shared.messages import JobClass
from shared.settings import GatewaySettings
from shared.telemetry import requests

_WHOLE_HEADERS = [(b"content-type", b"application/json")]
_TOKEN_HEADERS: Sequence[tuple[bytes, Verb]] = (
    (b"x-stream-token", "read"),
    (b"x-cancel-token", "cancel"),
)
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


class Reading(NamedTuple):
    """A parsed request body."""

    body: GenerationBody
    echoed: bytes = b"{}"
    """The fields of the body that a response repeats, as JSON."""
    promise: Callable[[Rendering], object] | None = None
    """The answer that is sent at once, if the client does not wait for the result."""
    in_own_words: Callable[[], AbstractContextManager[None]] = nullcontext
    """Raises the errors of the job in the terms of the endpoint."""
    ignored: tuple[str, ...] = ()
    """The unknown parameters."""

    @classmethod
    def of(cls, kind: type[GenerationBody], raw_body: bytes) -> "Reading":
        """Raises `InvalidRequest` and `ModelNotFound`."""
        body, ignored = parse_with_ignored(kind, raw_body)
        return cls(body, ignored=ignored)


class LiveResponse(Response):
    """Serves a request while it is sent: ``serve`` receives the body and sends the answer. Until
    the first byte is sent, errors are raised and become HTTP errors."""

    def __init__(self, serve: Callable[[Request, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Request(scope, receive), send)


def admitted(gateway: Gateway, answer: Callable[[Request], Awaitable[Response]]) -> LiveResponse:
    """Holds a slot for a request without a body from before ``answer`` until its response is sent,
    because the response may be large."""

    async def serve(request: Request, send: Send) -> None:
        with gateway.admission.admit(request.state.tenant):
            response = await answer(request)
            await response(request.scope, request.receive, send)

    return LiveResponse(serve)


async def generate(
    gateway: Gateway,
    request: Request,
    send: Send,
    prefix: str,
    read: Callable[[bytes], Reading],
) -> None:
    """Serve a request whose id begins with ``prefix``; ``read`` parses its body.

    The job is cancelled if its client leaves, at once or when it does not return, unless it is
    detached.
    """
    with gateway.admission.enter(request.state.tenant) as entry:
        raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
        body, echoed, promise, in_own_words, ignored = await parsed(read, raw_body)
        request.state.ignored_parameters = ignored
        entry.begin()
        if not body.model:
            body = msgspec.structs.replace(body, model=gateway.workers.only_model())
        request.state.model = body.model
        key = request.headers.get(KEY_HEADER)
        body_hash = "" if key is None else hash_body(raw_body)
        del raw_body  # an answer may take minutes
        now, tenant = time.time(), request.state.tenant
        caller: ApiKey = request.state.caller
        caller.require_model(body.model)
        kept = None
        if isinstance(body, ResponsesRequest):
            body, kept = await keeping.prepare(gateway, body, tenant, entry)
        with _log_for(gateway, prefix, tenant, key, is_detached=body.detach) as log:
            submitted = submission(
                body,
                request_id=log.request_id,
                created_at=now,
                deadline=now + _timeout_s(gateway.settings, body),
                served=await gateway.workers.find(body.model),
                tenant=tenant,
                body_hash=body_hash,
                is_stored=kept is not None,
                echoed=echoed,
                trace=requests.inject(),
            )
            submitted = submitted.limited(caller)
            lane = body.job_class
            if lane == "interactive":
                num_in_flight = gateway.metrics.tenant_usage.num_in_flight(tenant)
                gateway.workers.admit(body.model, num_in_flight)
            submitted = await submitted.checked()
            request.state.ignored_tools = body.ignored_tools
            job, state = submitted.job, request.scope["state"]
            detached = job if body.detach else None
            num_tokens = tokens_of(job) if caller.has_limits or body.detach else 0
            async with gateway.limits.admit(caller, num_tokens, detached) as grant:
                if isinstance(body, ResponsesRequest) and body.truncation == "auto":
                    timeout_s = gateway.settings.request_timeout_s  # a background job has longer
                    job = await truncated(gateway.quick, job, now + timeout_s)
                    submitted = submitted._replace(job=job)
                # The job is published soon after this, or another gateway takes it for lost.
                async with nullcontext() if kept is None else kept.begin(log.request_id, grant):
                    # Not before: the spare log of a refused request becomes another one's.
                    request.state.request_id = log.request_id
                    if promise is not None:
                        return await _start(
                            gateway, log, submitted, grant, promise, request, send, lane
                        )
                    with (
                        in_own_words(),
                        Observation(gateway.metrics, job, lane, state) as observation,
                    ):
                        framer = _framer(request, submitted)
                        try:
                            answer = _Answer(
                                gateway, submitted, grant, observation, framer, lane, kept
                            )
                            await answer.send(log, request.receive, send)
                            grant.settle(observation.num_prompt_tokens + observation.num_tokens)
                        except ClientGone:
                            observation.client_left()


@contextmanager
def _log_for(
    gateway: Gateway, prefix: str, tenant: str, key: str | None, *, is_detached: bool
) -> Iterator[ReplyLog]:
    """The log of a new request, whose id begins with ``prefix``, and may be derived from its
    Idempotency-Key.

    Raises `InvalidRequest`.
    """
    queues = gateway.reply_queues
    retention_s = gateway.settings.detach_ttl_s if is_detached else 0.0
    if key is not None:
        request_id = gateway.signer.request_id(prefix, tenant, check_key(key))
        yield queues.named(request_id, retention_s, may_exist=True)
    elif is_detached:
        yield queues.named(new_id(prefix), retention_s)
    else:
        with queues.take(prefix) as log:
            yield log


def _timeout_s(settings: GatewaySettings, body: GenerationBody) -> float:
    timeout_s = settings.detach_ttl_s if body.detach else settings.request_timeout_s
    return min(timeout_s, body.timeout or timeout_s)


def _framer(request: Request, submitted: Submission) -> Framer:
    """Some of OpenAI's clients expect frames that contain only ``data:``. Ids are sent to clients
    that accept event streams, and to those of detached requests, which may return."""
    has_ids = "text/event-stream" in request.headers.get("accept", "")
    return Framer(is_numbered=has_ids or submitted.facts.is_detached)


async def _start(
    gateway: Gateway,
    log: ReplyLog,
    submitted: Submission,
    grant: Grant,
    promise: Callable[[Rendering], object],
    request: Request,
    send: Send,
    lane: JobClass,
) -> None:
    """Publish a job without waiting for its result."""
    async with gateway.relays.open(log, submitted.job, submitted.facts, lane=lane) as relay:
        grant.publish(has_ended=relay.has_ended)
        relay.close(Departure.LEFT)
    requests.write_line("request accepted", submitted.job, {"detached": True})
    body = msgspec.json.encode(promise(submitted.rendering))
    await Response(body, media_type="application/json")(request.scope, request.receive, send)


class _Answer:
    """Runs a job and sends its result, as a stream or whole."""

    def __init__(
        self,
        gateway: Gateway,
        submitted: Submission,
        grant: Grant,
        observation: Observation,
        framer: Framer,
        lane: JobClass,
        kept: Keeping | None,
    ) -> None:
        """``kept``: how the response is stored; None if it is not."""
        self._gateway = gateway
        self._submitted = submitted
        self._grant = grant
        self._observation = observation
        self._framer = framer
        self._lane = lane
        self._kept = kept
        self._has_begun = False
        """Whether the client was sent the stream's id."""

    async def send(self, log: ReplyLog, receive: Receive, send: Send) -> None:
        job, facts, rendering, _ = self._submitted
        if facts.body_hash and not facts.is_detached:
            # The client may have sent the request again, to a gateway that was faster.
            await require_client(receive)
        has_ids = rendering.is_stream and self._framer.is_numbered
        relays, lane = self._gateway.relays, self._lane
        async with relays.open(log, job, facts, has_ids=has_ids, lane=lane) as relay:
            self._grant.publish(has_ended=relay.has_ended)
            self._observation.accepted(relay)
            try:
                if rendering.is_stream:
                    await self._stream(relay, receive, send)
                else:
                    await self._send_whole(relay, receive, send)
                await self._leave(relay, Departure.SERVED)
            except ClientGone:
                await self._leave(relay, Departure.LEFT if self._has_begun else Departure.ABANDONED)
                raise
            except WarrenError:
                await self._leave(relay, Departure.REFUSED)
                raise

    async def _leave(self, relay: LogRelay, departure: Departure) -> None:
        relay.close(departure)
        is_answered = departure is Departure.SERVED and relay.is_ended
        if self._kept is not None and not is_answered and relay.fate is Fate.ENDS:
            await self._kept.discard()

    async def _send_whole(self, relay: LogRelay, receive: Receive, send: Send) -> None:
        async with until_disconnect(receive):
            answer = await gather(relay, self._submitted, self._observation)
        if isinstance(answer, ResponseObject) and answer.store and relay.facts is not None:
            await keeping.finish(self._gateway, relay.facts.tenant, answer)
        body = msgspec.json.encode(answer)
        headers = [*_WHOLE_HEADERS, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_last(send, body)

    async def _stream(self, relay: LogRelay, receive: Receive, send: Send) -> None:
        stream = EventStream(
            relay,
            self._gateway.settings,
            self._framer,
            partial(keeping.finish, self._gateway),
            self._observation,
            self._submitted,
        )
        async with until_disconnect(receive):
            first = await relay.take(self._gateway.settings.first_event_timeout_s)
            raise_failure(first)
            data = stream.word(first) if first else stream.ping
            headers = [*STREAM_HEADERS, *self._tokens(relay.request_id)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._has_begun = True
            last = await stream.send_all(data, send)
        await stream.send_last(last, send)

    def _tokens(self, request_id: str) -> Iterator[tuple[bytes, bytes]]:
        """The headers with stream tokens, which are valid as long as the log can be kept."""
        settings, job = self._gateway.settings, self._submitted.job
        is_detached = self._submitted.facts.is_detached
        kept_s = settings.detach_ttl_s if is_detached else settings.reply_retention_s
        assert job.deadline is not None
        for header, verb in _TOKEN_HEADERS:
            token = self._gateway.signer.stream_token(
                request_id, verb, job.deadline + kept_s, tenant=job.tenant
            )
            yield header, token.encode()


async def gather(relay: LogRelay, submitted: Submission, observation: Observation) -> object:
    """Read the whole answer of a log. Raises the error with which the job failed."""
    gathering: Gathering | None = None
    while not relay.is_ended:
        items = await relay.take()
        raise_failure(items)
        observation.read(items)
        for item in items:
            if gathering is None or isinstance(item, Restarted):
                facts = relay.facts or submitted.facts
                gathering = Gathering(rendering_in(facts, submitted))
            if not isinstance(item, Restarted):
                gathering.read(item)
    assert gathering is not None
    return whole_answer(gathering)


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    def answer(kind: type[ChatRequest | CompletionRequest], prefix: str) -> Response:
        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, prefix, partial(Reading.of, kind))

        return LiveResponse(serve)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=documented(ChatRequest, _CHAT_EXAMPLE, ChatCompletion, streams=True),
    )
    async def create_chat_completion() -> Response:
        """Answer a conversation."""
        return answer(ChatRequest, "chatcmpl-")

    @routes.post(
        "/v1/completions",
        openapi_extra=documented(CompletionRequest, _COMPLETION_EXAMPLE, Completion, streams=True),
    )
    async def create_completion() -> Response:
        """Continue one or several prompts."""
        return answer(CompletionRequest, "cmpl-")

    return routes
