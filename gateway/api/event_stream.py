"""Sends a log to a client as Server-Sent Events, and detects that a client has disconnected."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

from starlette.types import Receive, Send

from gateway.api.bodies.submission import Submission
from gateway.api.observation import Observation
from gateway.api.render.chat_completions import ChatChunks, ChunkEncoder, TextChunks
from gateway.api.render.formats import Rendering, decode_rendering, error_of, error_payload
from gateway.api.render.messages import PING as MESSAGES_PING
from gateway.api.render.messages import MessageEncoder
from gateway.api.render.receipts import ReceiptRecorder
from gateway.api.render.responses import ResponseEncoder, ResponseObject
from gateway.log.cursor import Item, LogEvent, LogFacts, Restarted
from gateway.log.framing import PING, FramedEncoder, Framer, StreamEncoder
from gateway.log.relay import LogRelay
from gateway.log.visiting import visit
from shared.errors import InternalError, ShuttingDown, Unavailable, WarrenError
from shared.messages import Failed, Finished, PromptScores, Receipt, Started, TokenDelta
from shared.telemetry import incidents

_IS_NOTICED_WITHIN_TURNS = 8
"""Turns of the event loop within which a server that has read a request also reads the client's
disconnect."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_RETRY_MS = 1000
"""Milliseconds until an ``EventSource`` asks again for a stream that this gateway cannot
continue."""


Finish: TypeAlias = Callable[[str, ResponseObject], Awaitable[None]]
"""Stores how a tenant's response has ended."""


Sign: TypeAlias = Callable[[Receipt], str]
"""Signs the receipt of an answer."""


class ClientGone(Exception):
    """The client closed the connection."""


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body when the client disconnects, and then raise `ClientGone`, or what receiving
    raises.

    The request's body must have been read, and the response's last bytes must be sent outside:
    servers report a complete response as a disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    is_inside = True

    def cancel(watch: asyncio.Task[None]) -> None:
        if is_inside and not watch.cancelled():
            task.cancel()

    watch = asyncio.create_task(_wait_disconnect(receive))
    watch.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        # The task may have been cancelled by others as well, which must not be swallowed.
        if watch.done() and not task.uncancel():
            watch.result()
            raise ClientGone from None
        raise
    finally:
        is_inside = False
        watch.cancel()


async def require_client(receive: Receive) -> None:
    """Raise `ClientGone` if the client left before its request was read."""
    async with until_disconnect(receive):
        for _ in range(_IS_NOTICED_WITHIN_TURNS):
            await asyncio.sleep(0)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Renders and sends the events that a relay passes on and that the client has not received
    yet."""

    def __init__(
        self,
        relay: LogRelay,
        ping_interval_s: float,
        framer: Framer,
        sign: Sign,
        finish: Finish,
        observation: Observation | None = None,
        submission: Submission | None = None,
    ) -> None:
        """``ping_interval_s``: how long the client hears nothing at most. ``submission`` is the
        submission of this request; None if the request resumes a stream."""
        self._relay = relay
        self._observation = observation
        self._framer = framer
        self._sign = sign
        self._recorder: ReceiptRecorder | None = None
        """None: the answer has no receipt."""
        self._finish = finish
        self._submission = submission
        self._encoder: FramedEncoder | None = None
        """None: the log has not said yet how it is rendered."""
        self._rendering = None if submission is None else submission.rendering
        """None: the log that is resumed has not been read yet."""
        self._failure: WarrenError | None = None
        self._num_starts = 0
        """Workers that have started the request, in this reading of the log."""
        self._num_announced_starts = 1
        """The number of starts that the client has been told about."""
        self._ping_s = ping_interval_s

    @property
    def failure(self) -> WarrenError | None:
        """The error with which the job failed, or with which the stream had to end."""
        return self._failure

    @property
    def ping(self) -> bytes:
        """A message that keeps the connection open while there is nothing to send."""
        return ping_for(self._rendering)

    def render(self, items: list[Item]) -> bytes:
        """Render the frames that the client has not been sent yet."""
        if self._observation is not None:
            self._observation.note_arrival()
        self._failure = None
        if isinstance(items[0], Restarted):
            self._encoder, self._num_starts = None, 0
            self._framer.restart()
        if self._encoder is None and self._relay.facts is not None:
            self._rendering = rendering_in(self._relay.facts, self._submission)
            self._encoder = FramedEncoder(self._framer, encoder_for(self._rendering))
            self._recorder = ReceiptRecorder.of(self._rendering)
        return b"".join([visit(event, self) for event in events_of(items)])

    def on_start(self, event: Started) -> bytes:
        if self._observation is not None:
            self._observation.on_start(event)
        if self._recorder is not None:
            self._recorder.on_start(event)
        if self._encoder is None:
            return b""
        return self._continuation_comment() + self._encoder.on_start(event)

    def on_scores(self, event: PromptScores) -> bytes:
        return b"" if self._encoder is None else self._encoder.on_scores(event)

    def on_tokens(self, event: TokenDelta) -> bytes:
        if self._observation is not None:
            self._observation.on_tokens(event)
        if self._recorder is not None:
            self._recorder.on_tokens(event)
        return b"" if self._encoder is None else self._encoder.on_tokens(event)

    def on_finish(self, event: Finished) -> bytes:
        if self._observation is not None:
            self._observation.on_finish(event)
        if self._recorder is not None:
            self._recorder.on_finish(event)
        return b"" if self._encoder is None else self._encoder.on_finish(event)

    def on_failure(self, event: Failed) -> bytes:
        self._failure = error_of(event)
        if self._encoder is None:
            return self._frame_error(self._failure)
        return self._encoder.on_failure(event)

    def _continuation_comment(self) -> bytes:
        """A comment that says that another worker continues; empty for the first worker.

        Comments go to clients that receive event ids, because others may expect only data.
        """
        self._num_starts += 1
        if self._num_starts <= self._num_announced_starts or not self._framer.is_numbered:
            return b""
        self._num_announced_starts = self._num_starts
        lost_runs = self._relay.cursor.lost_runs[self._num_starts - 2 : self._num_starts]
        is_lost = len(lost_runs) == 2 and lost_runs[0] < lost_runs[1]
        reason = b"worker_lost" if is_lost else b"handed_over"
        return b': continued {"attempt": %d, "reason": "%b"}\n\n' % (self._num_starts, reason)

    def end(self) -> bytes:
        """The frames after the end of the log."""
        if self._failure is not None:
            if self._observation is not None:
                self._observation.failed(self._failure)
            return b""
        assert self._encoder is not None
        recorder = self._recorder
        receipt = None if recorder is None else self._sign(recorder.receipt(time.time()))
        return self._framer.frame_between(self._encoder.encoder.end(receipt))

    async def send_all(self, data: bytes, send: Send) -> bytes:
        """Send ``data`` and the rest of the stream except its last bytes, which are returned."""
        relay = self._relay
        try:
            while not relay.is_ended:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                items = await relay.take(self._ping_s)
                data = self.render(items) if items else self.ping
            return data + self.end()
        except OSError:  # a client that does not read is treated as disconnected
            raise ClientGone from None
        except WarrenError as error:
            return self._failed(error)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 (one request's bug is one request's failure)
            incidents.report("request", "stream failed", error, request_id=relay.request_id)
            return self._failed(InternalError("The gateway failed on this request."))

    async def send_last(self, data: bytes, send: Send) -> None:
        """Send the end, once the response that it completes is stored."""
        relay, framed = self._relay, self._encoder
        encoder = None if framed is None else framed.encoder
        if isinstance(encoder, ResponseEncoder) and relay.is_ended and relay.facts is not None:
            response = encoder.outcome
            if response is not None and response.store:
                await self._finish(relay.facts.tenant, response)
        await send_last(send, data)

    def _failed(self, error: WarrenError) -> bytes:
        """The end of a stream that the gateway cannot complete."""
        retry_ms = _RETRY_MS if isinstance(error, Unavailable) else None
        if isinstance(error, ShuttingDown):
            error = ShuttingDown(
                "This gateway is shutting down. To continue at another one, GET "
                f"/v1/streams/{self._relay.request_id} with the id of the last event."
            )
        self._failure = error
        if self._observation is not None:
            self._observation.failed(error)
        return self._frame_error(error, retry_ms=retry_ms)

    def _frame_error(self, error: WarrenError, *, retry_ms: int | None = None) -> bytes:
        framed, frame = self._encoder, self._framer.frame_unnumbered
        encoder = None if framed is None else framed.encoder
        if encoder is None and self._rendering is not None:
            encoder = encoder_for(self._rendering)
        payloads = [error_payload(error)] if encoder is None else encoder.fail(error)
        return b"".join([frame(payload, retry_ms=retry_ms) for payload in payloads])


def encoder_for(rendering: Rendering) -> StreamEncoder:
    """The encoder of a request's stream, from the first event of its log."""
    match rendering.endpoint:
        case "chat":
            return ChunkEncoder(rendering, ChatChunks(rendering))
        case "completions":
            return ChunkEncoder(rendering, TextChunks(rendering))
        case "responses":
            return ResponseEncoder(rendering)
        case "messages":
            return MessageEncoder(rendering)


def ping_for(rendering: Rendering | None) -> bytes:
    """A message that keeps an idle connection open. Anthropic's clients expect an event, and may
    count events to detect that a stream has stalled."""
    is_messages = rendering is not None and rendering.endpoint == "messages"
    return MESSAGES_PING if is_messages else PING


async def send_last(send: Send, data: bytes) -> None:
    """Send the last bytes of a body. Raises `ClientGone`."""
    try:
        await send({"type": "http.response.body", "body": data, "more_body": False})
    except OSError:
        raise ClientGone from None


def rendering_in(facts: LogFacts, own: Submission | None) -> Rendering:
    """How to render a log. The log of an Idempotency-Key may belong to another submission. Raises
    `StreamNotFound`."""
    return own.rendering if own is not None and own.facts is facts else decode_rendering(facts)


def events_of(items: list[Item]) -> Sequence[LogEvent]:
    """The events among ``items``; `Restarted` can only be the first."""
    return cast("list[LogEvent]", items[1:] if isinstance(items[0], Restarted) else items)


def raise_failure(items: list[Item]) -> None:
    """Raise the error with which the job failed, if it did."""
    if items and isinstance(items[-1], Failed):
        raise error_of(items[-1])
