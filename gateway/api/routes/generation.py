"""POST /v1/chat/completions and /v1/completions; serves a generation from the request's body to the
last byte of its answer, in one coroutine."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api import compute_once, response_storage
from gateway.api.bodies.parsing import parse_with_ignored
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import GenerationBody, Submission, submission
from gateway.api.event_stream import (
    STREAM_HEADERS,
    ClientGone,
    EventStream,
    Sign,
    raise_failure,
    rendering_in,
    require_client,
    send_last,
    until_disconnect,
)
from gateway.api.observation import Observation
from gateway.api.openapi import documented
from gateway.api.render import whole_answer
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.formats import ChatCompletion, Completion, Rendering
from gateway.api.render.responses import ResponseObject
from gateway.api.response_storage import ResponseStorage
from gateway.intake.admission import Entry, read_body
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Grant
from gateway.intake.receipts import hash_request
from gateway.intake.signer import KEY_HEADER, Verb, check_key, hash_body
from gateway.log.cursor import Departure, Fate, Restarted
from gateway.log.framing import Framer
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog, new_id
from gateway.once.execution import ExecutionTerms
from gateway.once.relay import SharedRelay
from gateway.wiring import Gateway
from shared.errors import WarrenError
from shared.messages import GenerationJob, JobClass
from shared.messages.token_estimates import tokens_of
from shared.off_loop import off_loop
from shared.settings import GatewaySettings
from shared.telemetry import requests

_BYTES_OF_LOGPROB = 400
"""The approximate memory of a logprob in a whole answer."""
_MAX_WAITING_BYTES = 1 << 20
"""Of the body of a request that waits for the limits of its key."""
_MANY_LOGPROBS = 1 << 12
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


class Origin(NamedTuple):
    """The place in an answer at which a request continues it."""

    stream_id: str
    choice: int
    at: int
    """The number of the choice's tokens before it."""


class ParsedRequest(NamedTuple):
    """A parsed request body."""

    body: GenerationBody
    echoed: bytes = b"{}"
    """The fields of the body that a response repeats, as JSON."""
    background_answer: Callable[[Rendering], object] | None = None
    """The answer that is sent at once, if the client does not wait for the result."""
    translate_errors: Callable[[], AbstractContextManager[None]] = nullcontext
    """Raises the errors of the job in the terms of the endpoint."""
    ignored: tuple[str, ...] = ()
    """The unknown parameters."""
    request_sha256: str = ""
    """`hash_request` of the body, if the answer has a receipt."""
    origin: Origin | None = None
    """Where the request continues another answer; None if it does not."""
    given_ids: tuple[int, ...] = ()
    """The tokens with which each choice begins, once the answer was read that it continues."""

    @classmethod
    def of(cls, kind: type[GenerationBody], raw_body: bytes) -> "ParsedRequest":
        """Raises `InvalidRequest` and `ModelNotFound`."""
        body, ignored = parse_with_ignored(kind, raw_body)
        return cls(body, ignored=ignored)

    def with_receipt(self, gateway: Gateway, caller: ApiKey, raw_body: bytes) -> "ParsedRequest":
        """The same with the body's hash, if the request or its caller asks for a receipt. Raises
        `InvalidRequest`."""
        if not (self.body.receipt or caller.receipts):
            return self
        gateway.receipts.require()
        return self._replace(request_sha256=hash_request(raw_body))

    async def load_history(
        self, gateway: Gateway, tenant: str, entry: Entry
    ) -> tuple["ParsedRequest", ResponseStorage | None]:
        """The request with the items that it continues, and the storage of its response, if it is
        stored. ``entry`` holds the added items until the request ends."""
        return self, None

    async def truncate_prompt(self, gateway: Gateway, job: GenerationJob) -> GenerationJob:
        """The job with as much of its prompt as fits the model's context, if the request permits
        leaving some of it out."""
        return job


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
    and the response's bytes, because these may be many."""

    async def serve(request: Request, send: Send) -> None:
        with gateway.admission.admit_without_body(request.state.tenant) as entry:
            response = await answer(request)
            if not isinstance(response, StreamingResponse):
                entry.hold(len(response.body))
            await response(request.scope, request.receive, send)

    return LiveResponse(serve)


async def generate(
    gateway: Gateway,
    request: Request,
    send: Send,
    prefix: str,
    read: Callable[[bytes], ParsedRequest],
) -> None:
    """Serve a request whose id begins with ``prefix``; ``read`` parses its body.

    The job is cancelled if its client leaves, at once or when it does not return, unless it is
    detached.
    """
    caller: ApiKey = request.state.caller
    tenant: str = request.state.tenant
    key = request.headers.get(KEY_HEADER)
    repeated = "" if key is None else _repeated_id(gateway, prefix, tenant, key)
    with (
        gateway.admission.admit_with_body(tenant) as entry,
        gateway.limits.attempt(caller, repeated, waiting_bytes=_waiting_bytes(request)) as attempt,
        suppress(ClientGone),
    ):
        parsed, body_hash = await _read(gateway, request, entry, read)
        if parsed.body.on_limit == "wait":
            attempt.refusal = None
        attempt.require_now()
        arrived_at = time.time()
        parsed, storage = await parsed.load_history(gateway, tenant, entry)
        with _log_for(gateway, prefix, repeated, is_detached=parsed.body.detach) as log:
            submitted = await _build_submission(
                gateway,
                request,
                parsed,
                log,
                arrived_at,
                body_hash,
                is_stored=storage is not None,
                num_bytes=entry.num_bytes,
            )
            if parsed.given_ids:
                submitted = submitted.continuing(parsed.given_ids)
            job = submitted.job
            num_tokens = tokens_of(job) if caller.has_limits else 0
            async with _admitted(gateway, request, parsed.body, num_tokens, job) as grant:
                attempt.is_admitted = True
                # What takes long counts, even if the request is refused then.
                submitted = await submitted.check_constraint()
                job = await parsed.truncate_prompt(gateway, submitted.job)
                submitted, terms = _shared(
                    gateway, request, parsed, submitted._replace(job=job), prefix, storage
                )
                if parsed.request_sha256:
                    submitted = submitted.with_receipt(parsed.request_sha256)
                job_class = parsed.body.job_class
                responder = Responder(
                    gateway, request, send, log, submitted, terms, job_class, grant, storage, entry
                )
                # The job is published soon after this, or another gateway takes it for lost.
                async with (
                    nullcontext() if storage is None else storage.begin(log.request_id, grant)
                ):
                    # Set only now: the log of a refused request is reused, and its id must not
                    # appear in two requests.
                    request.state.request_id = submitted.job.request_id
                    if parsed.background_answer is not None:
                        await responder.start(parsed.background_answer)
                    else:
                        with parsed.translate_errors():
                            await responder.answer()


def _shared(
    gateway: Gateway,
    request: Request,
    parsed: ParsedRequest,
    submitted: Submission,
    prefix: str,
    storage: ResponseStorage | None,
) -> tuple[Submission, ExecutionTerms | None]:
    """The request under the id of its stream, and the execution that it shares; None if it shares
    none. Raises `InvalidRequest`."""
    if not compute_once.wants_once(gateway, request):
        return submitted, None
    is_of_its_own = submitted.facts.body_hash or storage is not None or parsed.background_answer
    if not is_of_its_own:
        job_class = parsed.body.job_class
        shared = compute_once.shared(gateway, submitted, prefix, job_class, parsed.request_sha256)
        if shared is not None:
            return shared.own, shared.terms
    compute_once.note_bypass(gateway, request, submitted.job.model)
    return submitted, None


def _waiting_bytes(request: Request) -> int:
    """The length of a body that may be read although the key is at its limits, otherwise 0."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and int(length) <= _MAX_WAITING_BYTES else 0


@asynccontextmanager
async def _admitted(
    gateway: Gateway, request: Request, body: GenerationBody, num_tokens: int, job: GenerationJob
) -> AsyncIterator[Grant]:
    """The slot of a request within the limits of its key, for which it may wait as long as its
    client does. Raises as `Limits.admit` and `Turnstiles.admit`, and `ClientGone`."""
    caller: ApiKey = request.state.caller
    async with AsyncExitStack() as stack:
        if body.on_limit == "wait":
            async with until_disconnect(request.receive):
                admission = gateway.turnstiles.admit(caller, num_tokens, job)
                grant = await stack.enter_async_context(admission)
        else:
            grant = await stack.enter_async_context(gateway.limits.admit(caller, num_tokens, job))
        yield grant


async def _read(
    gateway: Gateway, request: Request, entry: Entry, read: Callable[[bytes], ParsedRequest]
) -> tuple[ParsedRequest, str]:
    """The parsed body, which names a model that the caller may use, and its hash if the request has
    an Idempotency-Key, otherwise an empty string.

    Raises `RequestError`, `ModelNotFound`, `Overloaded`, `Unavailable` and HTTPException.
    """
    raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
    caller: ApiKey = request.state.caller
    parsed = await off_loop(partial(_parsed, gateway, caller, raw_body, read), entry.num_bytes)
    request.state.ignored_parameters = parsed.ignored
    entry.begin()
    if not parsed.body.model:
        model = gateway.workers.only_model()
        parsed = parsed._replace(body=msgspec.structs.replace(parsed.body, model=model))
    request.state.model = parsed.body.model
    body_hash = ""
    if KEY_HEADER in request.headers:
        origin = b"" if parsed.origin is None else msgspec.json.encode(parsed.origin)
        body_hash = await off_loop(partial(hash_body, raw_body + origin), len(raw_body))
    caller.require_model(parsed.body.model)
    return parsed, body_hash


def _parsed(
    gateway: Gateway, caller: ApiKey, raw_body: bytes, read: Callable[[bytes], ParsedRequest]
) -> ParsedRequest:
    return read(raw_body).with_receipt(gateway, caller, raw_body)


async def _build_submission(
    gateway: Gateway,
    request: Request,
    parsed: ParsedRequest,
    log: ReplyLog,
    arrived_at: float,
    body_hash: str,
    *,
    is_stored: bool,
    num_bytes: int,
) -> Submission:
    """The job of a request that arrived at the Unix time ``arrived_at`` and takes so many bytes of
    memory. Raises `RequestError`,
    `ModelNotFound`, `Overloaded`, `Unavailable` and `BusUnavailable`."""
    body, tenant = parsed.body, request.state.tenant
    build = partial(
        submission,
        body,
        request_id=log.request_id,
        created_at=arrived_at,
        deadline=arrived_at + _timeout_s(gateway.settings, body),
        served=await gateway.workers.find(
            body.model, may_wait=body.detach or body.job_class == "batch"
        ),
        tenant=tenant,
        body_hash=body_hash,
        is_stored=is_stored,
        echoed=parsed.echoed,
        trace=requests.inject(),
    )
    submitted = (await off_loop(build, num_bytes)).limited(request.state.caller)
    if body.job_class == "interactive":
        num_in_flight = gateway.metrics.tenant_usage.num_interactive(tenant)
        gateway.workers.require_short_wait(body.model, num_in_flight)
    request.state.ignored_tools = body.ignored_tools
    return submitted


def _repeated_id(gateway: Gateway, prefix: str, tenant: str, key: str) -> str:
    """The id of all requests with the same Idempotency-Key. Raises `InvalidRequest`."""
    return gateway.signer.request_id(prefix, tenant, check_key(key))


@contextmanager
def _log_for(
    gateway: Gateway, prefix: str, repeated: str, *, is_detached: bool
) -> Iterator[ReplyLog]:
    """The log of a request with the id ``repeated``, or of a new request whose id begins with
    ``prefix``."""
    queues = gateway.reply_queues
    retention_s = gateway.settings.detach_ttl_s if is_detached else 0.0
    if repeated:
        yield queues.named(repeated, retention_s, may_exist=True)
    elif is_detached:
        yield queues.named(new_id(prefix), retention_s)
    else:
        with queues.take(prefix) as log:
            yield log


def _timeout_s(settings: GatewaySettings, body: GenerationBody) -> float:
    timeout_s = settings.detach_ttl_s if body.detach else settings.request_timeout_s
    return min(timeout_s, body.timeout or timeout_s)


@dataclass(slots=True)
class Responder:
    """Publishes the job of an admitted request and answers its client."""

    gateway: Gateway
    request: Request
    send: Send
    log: ReplyLog
    submitted: Submission
    terms: ExecutionTerms | None
    """The execution that the request shares; None if it shares none."""
    job_class: JobClass
    grant: Grant
    storage: ResponseStorage | None
    """How the response is stored; None if it is not."""
    entry: Entry
    has_begun: bool = False
    """Whether the client was sent the stream's id."""

    async def start(self, background_answer: Callable[[Rendering], object]) -> None:
        """Publish the job and send the client ``background_answer`` instead of the result."""
        job = self.submitted.job
        async with self.gateway.relays.open(
            self.log, job, self.submitted.facts, lane=self.job_class
        ) as relay:
            self.grant.note_published(has_ended=relay.has_ended)
            relay.close(Departure.LEFT)
        requests.write_line("request accepted", job, {"detached": True})
        body = msgspec.json.encode(background_answer(self.submitted.rendering))
        answer = Response(body, media_type="application/json")
        await answer(self.request.scope, self.request.receive, self.send)

    async def answer(self) -> None:
        """Publish the job and send its result, as a stream or whole."""
        job, state = self.submitted.job, self.request.scope["state"]
        with Observation(self.gateway.metrics, job, self.job_class, state) as observation:
            try:
                await self._relay(observation)
            except ClientGone:
                observation.client_left()

    async def _relay(self, observation: Observation) -> None:
        facts, is_stream = self.submitted.facts, self.submitted.rendering.is_stream
        if facts.body_hash and not facts.is_detached:
            # The client may have sent the request again, to a gateway that was faster.
            await require_client(self.request.receive)
        framer = self._framer()
        async with self._opened(has_ids=is_stream and framer.is_numbered) as relay:
            self.grant.note_published(has_ended=relay.has_ended)
            observation.accepted(relay)
            try:
                if is_stream:
                    await self._stream(relay, framer, observation)
                else:
                    await self._send_whole(relay, observation)
                await self._leave(relay, Departure.SERVED, observation)
            except ClientGone:
                departure = Departure.LEFT if self.has_begun else Departure.ABANDONED
                await self._leave(relay, departure, observation)
                raise
            except WarrenError:
                await self._leave(relay, Departure.REFUSED, observation)
                raise

    def _opened(self, *, has_ids: bool) -> AbstractAsyncContextManager[LogRelay]:
        job, terms = self.submitted.job, self.terms
        if terms is not None:
            return self.gateway.executions.open(job, terms, has_ids=has_ids)
        return self.gateway.relays.open(
            self.log, job, self.submitted.facts, has_ids=has_ids, lane=self.job_class
        )

    def _framer(self) -> Framer:
        """Some of OpenAI's clients expect frames that contain only ``data:``. Ids are sent to
        clients that accept event streams, and to clients of detached requests, because they may
        return."""
        accepts_ids = "text/event-stream" in self.request.headers.get("accept", "")
        return Framer(is_numbered=accepts_ids or self.submitted.facts.is_detached)

    async def _leave(self, relay: LogRelay, departure: Departure, observation: Observation) -> None:
        relay.close(departure)
        if isinstance(relay, SharedRelay):
            self.grant.settle(observation.total_tokens)
            compute_once.record_share(
                self.gateway, relay, self.submitted, self.job_class, observation
            )
        elif relay.has_ended:
            # Of an end that the client has not taken, its worker reports the tokens.
            self.grant.settle(observation.total_tokens if relay.is_ended else None)
        elif relay.fate is Fate.ENDS and not relay.is_answered:
            self.grant.drop()
        is_answered = departure is Departure.SERVED and relay.is_ended
        if self.storage is not None and not is_answered and relay.fate is Fate.ENDS:
            await self.storage.discard()

    async def _send_whole(self, relay: LogRelay, observation: Observation) -> None:
        async with until_disconnect(self.request.receive):
            sign = self.gateway.receipts.sign
            answer = await read_answer(relay, self.submitted, observation, sign, self.entry.hold)
        if isinstance(answer, ResponseObject) and answer.store and relay.facts is not None:
            await response_storage.finish(self.gateway, relay.facts.tenant, answer)
        self._note_share(relay)
        body = msgspec.json.encode(answer)
        headers = [*_WHOLE_HEADERS, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_last(self.send, body)

    async def _stream(self, relay: LogRelay, framer: Framer, observation: Observation) -> None:
        stream = EventStream(
            relay,
            self.gateway.tuning.ping_interval_s,
            framer,
            self.gateway.receipts.sign,
            partial(response_storage.finish, self.gateway),
            observation,
            self.submitted,
        )
        async with until_disconnect(self.request.receive):
            first = await relay.take(self.gateway.tuning.first_event_timeout_s)
            raise_failure(first)
            data = stream.render(first) if first else stream.ping
            self._note_share(relay)
            headers = [*STREAM_HEADERS, *self._tokens(relay.request_id)]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_begun = True
            last = await stream.send_all(data, self.send)
        await stream.send_last(last, self.send)

    def _note_share(self, relay: LogRelay) -> None:
        if isinstance(relay, SharedRelay):
            compute_once.note_share(self.request, relay)

    def _tokens(self, request_id: str) -> Iterator[tuple[bytes, bytes]]:
        """The headers with stream tokens, which are valid as long as the log can be kept. A token
        permits no more than its caller's key. A person's session has no key that a token could end
        with."""
        if self.request.state.caller.person:
            return
        settings, job = self.gateway.settings, self.submitted.job
        if self.submitted.facts.is_detached:
            kept_s = settings.detach_ttl_s
        else:
            kept_s = self.gateway.tuning.keep_log_s(settings.disconnect_grace_s)
        scopes = self.request.state.caller.scopes
        assert job.deadline is not None
        for header, verb in _TOKEN_HEADERS:
            if verb == "cancel" and "cancel" not in scopes:
                continue
            token = self.gateway.signer.stream_token(
                request_id, verb, job.deadline + kept_s, key_id=job.key_id
            )
            yield header, token.encode()


async def read_answer(
    relay: LogRelay,
    submitted: Submission,
    observation: Observation,
    sign: Sign,
    hold: Callable[[int], object] = lambda num_bytes: None,
) -> object:
    """Read the whole answer of a log, and ``sign`` its receipt. ``hold`` counts the memory of its
    logprobs, which may be many times the memory of the request. Raises the error with which the job
    failed."""
    builder: AnswerBuilder | None = None
    num_held = 0
    while not relay.is_ended:
        items = await relay.take()
        raise_failure(items)
        observation.read_all(items)
        for item in items:
            if builder is None or isinstance(item, Restarted):
                facts = relay.facts or submitted.facts
                builder = AnswerBuilder(rendering_in(facts, submitted))
            if not isinstance(item, Restarted):
                builder.read(item)
        num_logprobs = 0 if builder is None else builder.num_logprobs
        if num_logprobs > num_held:
            hold((num_logprobs - num_held) * _BYTES_OF_LOGPROB)
            num_held = num_logprobs
    assert builder is not None
    builder.issue_receipt(sign)
    if builder.num_logprobs < _MANY_LOGPROBS:
        return whole_answer(builder)
    return await asyncio.to_thread(whole_answer, builder)  # other requests go on


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    def answer(kind: type[ChatRequest | CompletionRequest], prefix: str) -> Response:
        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, prefix, partial(ParsedRequest.of, kind))

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
        """Continue one prompt or several prompts."""
        return answer(CompletionRequest, "cmpl-")

    return routes
