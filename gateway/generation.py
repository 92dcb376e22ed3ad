"""A request from its job to the last byte of its answer."""

import asyncio
import logging

import msgspec
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.deps import Gateway
from gateway.disconnect import ClientGone, until_disconnect
from gateway.formats import Answer, AnswerFormat
from gateway.observation import Observation
from gateway.relay import JobRelay
from gateway.sse import PING, ChunkEncoder, error_event
from shared import errors, telemetry
from shared.errors import InternalError, WarrenError
from shared.messages import Failed, Finished, GenerationJob, TokenDelta
from shared.stream import Relay

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 30.0
_WHOLE_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Runs a job and answers with what comes of it, as a stream or whole.

    The job runs while this response is sent, and is cancelled when it ends early for whatever
    reason. Until the first byte is sent, errors are raised and become HTTP errors.
    """

    def __init__(
        self,
        gateway: Gateway,
        job: GenerationJob,
        words: AnswerFormat,
        *,
        is_stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._job = job
        self._words = words
        self._is_stream = is_stream
        self._encoder = ChunkEncoder(job, words, include_usage=include_usage)
        self._observation = Observation(gateway.metrics, job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = telemetry.extract(Headers(scope=scope))
        with (
            self._gateway.admission.admit(),
            telemetry.tracer.start_as_current_span(
                "gateway.request",
                parent,
                SpanKind.SERVER,
                {"request_id": self._job.request_id, "model": self._job.model},
            ),
            self._observation,
        ):
            try:
                await self._answer(receive, send)
            except ClientGone:
                self._observation.client_left()

    async def _answer(self, receive: Receive, send: Send) -> None:
        job = msgspec.structs.replace(self._job, trace=telemetry.inject())
        async with self._gateway.relays.open(job) as relay:
            if self._is_stream:
                await self._stream(relay, receive, send)
            else:
                await self._send_whole(relay, receive, send)

    async def _send_whole(self, relay: JobRelay, receive: Receive, send: Send) -> None:
        async with until_disconnect(receive):
            answer = await self._collect(relay)
        body = msgspec.json.encode(answer)
        headers = [*_WHOLE_HEADERS, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_last(send, body)

    async def _stream(self, relay: JobRelay, receive: Receive, send: Send) -> None:
        async with until_disconnect(receive):
            first = await relay.take(self._gateway.settings.first_event_timeout_s)
            _raise_failure(first)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            last = await self._relay_events(relay, first, send)
        await _send_last(send, last)

    async def _relay_events(self, relay: JobRelay, relays: list[Relay], send: Send) -> bytes:
        """Send the stream but for its end, which is returned and is never missing."""
        ping_s = self._gateway.settings.ping_interval_s
        try:
            async with asyncio.timeout(None) as patience:
                while not relay.is_ended:
                    self._observation.read(relays)
                    _extend(patience, _SEND_TIMEOUT_S + ping_s)
                    if data := self._encoder.encode(relays) if relays else PING:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    relays = await relay.take(ping_s)
            self._observation.read(relays)
            return self._encoder.encode(relays) + self._end(relays)
        except (TimeoutError, OSError):  # a client that does not read is as good as gone
            raise ClientGone from None
        except WarrenError as error:
            return self._failed(error)
        except ClientGone:
            raise
        except Exception:
            logger.exception("stream failed", extra={"request_id": self._job.request_id})
            return self._failed(InternalError("The gateway failed on this request."))

    def _failed(self, error: WarrenError) -> bytes:
        self._observation.failed(error)
        return error_event(error)

    def _end(self, relays: list[Relay]) -> bytes:
        failure = _failure(relays)
        if failure is None:
            return self._encoder.end(self._observation.usage)
        self._observation.failed(failure)
        return b""

    async def _collect(self, relay: JobRelay) -> Answer:
        """Read the whole answer. Raises what the job failed of."""
        texts: list[list[str]] = [[] for _ in self._job.prompts]
        ends: dict[int, Finished] = {}
        while not relay.is_ended:
            relays = await relay.take()
            _raise_failure(relays)
            self._observation.read(relays)
            for event in (relay.event for relay in relays):
                if isinstance(event, TokenDelta | Finished):
                    texts[event.choice].append(event.text)
                if isinstance(event, Finished):
                    ends[event.choice] = event
        return Answer(
            id=self._job.request_id,
            object=self._words.answer_object,
            created=int(self._job.created_at),
            model=self._job.model,
            choices=[self._words.whole(k, "".join(text), ends[k]) for k, text in enumerate(texts)],
            usage=self._observation.usage,
        )


async def _send_last(send: Send, data: bytes) -> None:
    try:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": False})
    except (TimeoutError, OSError):
        raise ClientGone from None


def _extend(timeout: asyncio.Timeout, seconds: float) -> None:
    """Let ``timeout`` strike after ``seconds``, or one more: a timer is set once a second and not
    for each token, whose text would cost no more."""
    now = asyncio.get_running_loop().time()
    if (timeout.when() or 0) < now + seconds:
        timeout.reschedule(now + seconds + 1)


def _failure(relays: list[Relay]) -> WarrenError | None:
    event = relays[-1].event if relays else None
    if not isinstance(event, Failed):
        return None
    return errors.from_code(event.code, event.message, event.param)


def _raise_failure(relays: list[Relay]) -> None:
    failure = _failure(relays)
    if failure is not None:
        raise failure
