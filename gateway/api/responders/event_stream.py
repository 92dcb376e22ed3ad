"""A log on its way out as Server-Sent Events."""

from collections.abc import Sequence
from typing import cast

from starlette.types import Send

from gateway.api.bodies.submission import Submission
from gateway.api.render import encoder_for
from gateway.api.render.sse import error_of, error_payload
from gateway.api.rendering import Rendering, decode_rendering
from gateway.api.responders.disconnect import ClientGone
from gateway.api.responders.observation import Observation
from gateway.log.cursor import Item, LogEvent, Restarted
from gateway.log.facts import LogFacts
from gateway.log.framing import PING, Framer, StreamEncoder
from gateway.log.relay import LogRelay
from shared import incidents
from shared.errors import InternalError, Unavailable, WarrenError
from shared.messages import Failed
from shared.settings import GatewaySettings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_RETRY_MS = 1000
"""When an ``EventSource`` whose gateway shuts down comes back, to another one."""


class EventStream:
    """Words what a relay passes on, without what the client has seen, and sends it."""

    def __init__(
        self,
        relay: LogRelay,
        settings: GatewaySettings,
        framer: Framer,
        observation: Observation | None = None,
        submission: Submission | None = None,
    ) -> None:
        """``submission`` is what this request has sent, if it is not another one's stream."""
        self._relay = relay
        self._observation = observation
        self._framer = framer
        self._submission = submission
        self._encoder: StreamEncoder | None = None
        self._failure: WarrenError | None = None
        self._ping_s = settings.ping_interval_s

    def word(self, items: list[Item]) -> bytes:
        """The frames of accepted log events that the client has not been sent."""
        if self._observation is not None:
            self._observation.read(items)
        self._failure = failure_of(items)
        if isinstance(items[0], Restarted):
            self._encoder = None
            self._framer.restart()
        if self._encoder is None and self._relay.facts is not None:
            self._encoder = encoder_for(rendering_in(self._relay.facts, self._submission))
        if self._encoder is None:
            return b"" if self._failure is None else self._frame_error(self._failure)
        frame, encoder = self._framer.frame, self._encoder
        return b"".join([frame(event, encoder) for event in events_of(items)])

    def end(self) -> bytes:
        """What follows the log's end."""
        if self._failure is not None:
            if self._observation is not None:
                self._observation.failed(self._failure)
            return b""
        assert self._encoder is not None
        return self._framer.frame_between(self._encoder.end())

    async def send_all(self, data: bytes, send: Send) -> bytes:
        """Send ``data`` and the rest of the stream but for its end, which is returned and is never
        missing."""
        relay = self._relay
        try:
            while not relay.is_ended:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                items = await relay.take(self._ping_s)
                data = self.word(items) if items else PING
            return data + self.end()
        except OSError:  # a client that does not read is as good as gone
            raise ClientGone from None
        except WarrenError as error:
            return self._failed(error)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 (one request's bug is one request's failure)
            incidents.report("request", "stream failed", error, request_id=relay.request_id)
            return self._failed(InternalError("The gateway failed on this request."))

    async def send_last(self, data: bytes, send: Send) -> None:
        """Send the end."""
        await send_last(send, data)

    def _failed(self, error: WarrenError) -> bytes:
        """How a stream ends that the gateway gives up."""
        retry_ms = None
        if isinstance(error, Unavailable):
            error = Unavailable(
                f"This gateway ends. GET /v1/streams/{self._relay.request_id} with the last "
                "event's id goes on at another one."
            )
            retry_ms = _RETRY_MS
        if self._observation is not None:
            self._observation.failed(error)
        return self._frame_error(error, retry_ms=retry_ms)

    def _frame_error(self, error: WarrenError, *, retry_ms: int | None = None) -> bytes:
        encoder, frame = self._encoder, self._framer.frame_unnumbered
        payloads = [error_payload(error)] if encoder is None else encoder.fail(error)
        return b"".join([frame(payload, retry_ms=retry_ms) for payload in payloads])


async def send_last(send: Send, data: bytes) -> None:
    """Send the last bytes of a body. Raises `ClientGone`."""
    try:
        await send({"type": "http.response.body", "body": data, "more_body": False})
    except OSError:
        raise ClientGone from None


def rendering_in(facts: LogFacts, own: Submission | None) -> Rendering:
    """How a log is rendered; that of an Idempotency-Key may be another submission's. Raises
    `StreamNotFound`."""
    return own.rendering if own is not None and own.facts is facts else decode_rendering(facts)


def events_of(items: list[Item]) -> Sequence[LogEvent]:
    """The events among ``items``; `Restarted` can only be the first."""
    return cast("list[LogEvent]", items[1:] if isinstance(items[0], Restarted) else items)


def failure_of(items: list[Item]) -> WarrenError | None:
    """What the job failed of, if it did."""
    last = items[-1] if items else None
    return error_of(last) if isinstance(last, Failed) else None


def raise_failure(items: list[Item]) -> None:
    failure = failure_of(items)
    if failure is not None:
        raise failure
