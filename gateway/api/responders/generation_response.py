"""A request from its job to the last byte of its answer."""

import msgspec
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.bodies.draft import Submission
from gateway.api.render import whole_answer
from gateway.api.render.gathering import Gathering
from gateway.api.responders.disconnect import ClientGone, require_client, until_disconnect
from gateway.api.responders.event_stream import (
    STREAM_HEADERS,
    EventStream,
    raise_failure,
    rendering_in,
    send_last,
)
from gateway.api.responders.observation import Observation
from gateway.log.cursor import Restarted
from gateway.log.fate import Departure
from gateway.log.framing import PING, Framer
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared import telemetry
from shared.errors import WarrenError

_WHOLE_HEADERS = [(b"content-type", b"application/json")]


class GenerationResponse(Response):
    """Runs a job and answers with what comes of it, as a stream or whole.

    The job runs while this response is sent. When that ends early the job is cancelled, at once or
    when the client does not come back, unless it is detached. Until the first byte is sent, errors
    are raised and become HTTP errors.
    """

    def __init__(self, gateway: Gateway, submission: Submission) -> None:
        super().__init__()
        self._gateway = gateway
        self._submission = submission
        self._observation = Observation(gateway.metrics, submission.job)
        self._has_begun = False
        """Whether the client was sent the stream's id."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, job = Headers(scope=scope), self._submission.job
        parent = telemetry.extract(headers)
        with (
            self._gateway.admission.admit(),
            telemetry.tracer.start_as_current_span(
                "gateway.request",
                parent,
                SpanKind.SERVER,
                {"warren.request_id": job.request_id, "model": job.model},
            ),
            self._observation,
        ):
            try:
                await self._answer(self._framer(headers), receive, send)
            except ClientGone:
                self._observation.client_left()

    def _framer(self, headers: Headers) -> Framer:
        """Some clients of OpenAI's take every frame for ``data:`` alone, so that ids go only to
        those who say that they know them, or that they come back."""
        knows_ids = "text/event-stream" in headers.get("accept", "")
        return Framer(is_numbered=knows_ids or self._submission.facts.is_detached)

    async def _answer(self, framer: Framer, receive: Receive, send: Send) -> None:
        facts = self._submission.facts
        if facts.body_hash and not facts.is_detached:
            # The client may have sent the request again, to a gateway that was faster.
            await require_client(receive)
        job = msgspec.structs.replace(self._submission.job, trace=telemetry.inject())
        is_stream = self._submission.rendering.is_stream
        has_ids = is_stream and framer.is_numbered
        async with self._gateway.relays.open(job, facts, has_ids=has_ids) as relay:
            try:
                if is_stream:
                    await self._stream(relay, framer, receive, send)
                else:
                    await self._send_whole(relay, receive, send)
                relay.close(Departure.SERVED)
            except ClientGone:
                relay.close(Departure.LEFT if self._has_begun else Departure.ABANDONED)
                raise
            except WarrenError:
                relay.close(Departure.REFUSED)
                raise

    async def _send_whole(self, relay: LogRelay, receive: Receive, send: Send) -> None:
        async with until_disconnect(receive):
            answer = await self._gather(relay)
        body = msgspec.json.encode(answer)
        headers = [*_WHOLE_HEADERS, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_last(send, body, self._gateway.settings.send_timeout_s)

    async def _stream(self, relay: LogRelay, framer: Framer, receive: Receive, send: Send) -> None:
        stream = EventStream(
            relay, self._gateway.settings, framer, self._observation, self._submission
        )
        async with until_disconnect(receive):
            first = await relay.take(self._gateway.settings.first_event_timeout_s)
            raise_failure(first)
            data = stream.word(first) if first else PING
            token = self._gateway.signer.stream_token(relay.request_id).encode()
            headers = [*STREAM_HEADERS, (b"x-stream-token", token)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._has_begun = True
            last = await stream.send_all(data, send)
        await stream.send_last(last, send)

    async def _gather(self, relay: LogRelay) -> object:
        """Read the whole answer. Raises what the job failed of."""
        gathering: Gathering | None = None
        while not relay.is_ended:
            items = await relay.take()
            raise_failure(items)
            self._observation.read(items)
            for item in items:
                if gathering is None or isinstance(item, Restarted):
                    facts = relay.facts or self._submission.facts
                    gathering = Gathering(rendering_in(facts, self._submission))
                if not isinstance(item, Restarted):
                    gathering.read(item)
        assert gathering is not None
        return whole_answer(gathering, gathering.usage)
