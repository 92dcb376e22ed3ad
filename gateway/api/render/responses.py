"""Renders the answers of /v1/responses, as whole responses and as events."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.choice_reader import ChoiceReader
from gateway.api.render.formats import (
    ENCODER,
    PromptTokensDetails,
    Rendering,
    ServiceTier,
    StreamEvent,
    TokenCounts,
    Usage,
    error_of,
    obfuscation,
    system_fingerprint,
)
from gateway.api.render.output_items import ItemWriter
from gateway.errors import status_of
from gateway.log.framing import Payload
from shared.errors import TakenOver, Unavailable, WarrenError
from shared.messages import Failed, Finished, FinishReason, PromptScores, Started, TokenDelta

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]


_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses, by the status of the error; the others are
``server_error``."""
_NOTHING_SAID = ENCODER.encode(["", ()])


class Echo(Struct, frozen=True, kw_only=True):
    """The fields of its request that a response repeats."""

    background: Any = False
    conversation: Any = None
    instructions: Any = None
    max_output_tokens: Any = None
    max_tool_calls: Any = None
    metadata: Any = {}
    parallel_tool_calls: Any = True
    previous_response_id: Any = None
    reasoning: Any = field(default_factory=lambda: {"effort": None, "summary": None})
    store: Any = False
    temperature: Any = None
    text: Any = field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: Any = []
    top_logprobs: Any = None
    top_p: Any = None
    truncation: Any = "disabled"
    user: Any = None


class ResponseError(Struct, frozen=True, omit_defaults=True):
    code: str
    """A code of OpenAI's API."""
    message: str
    reason: str = ""
    """The code of the error elsewhere in this API. An extension of Warren."""


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Echo, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response, as far as it has been generated."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: Sequence[dict[str, Any]]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    service_tier: ServiceTier | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    """The same as in chats, once the response has ended. An extension of Warren."""
    receipt: str | UnsetType = UNSET
    """The same as in chats."""


def response_object(
    rendering: Rendering,
    status: ResponseStatus,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    error: WarrenError | None = None,
    fingerprint: str | None = None,
    receipt: str | None = None,
) -> ResponseObject:
    """A response, as far as it has been generated."""
    return ResponseObject(
        **{**msgspec.structs.asdict(_ECHO.decode(rendering.echoed)), "store": rendering.is_stored},
        id=rendering.request_id,
        created_at=rendering.created,
        model=rendering.model,
        status=status,
        output=output,
        error=None if error is None else _response_error(error),
        incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        usage=None if usage is None else _usage(usage),
        service_tier=rendering.service_tier or UNSET,
        system_fingerprint=fingerprint or UNSET,
        receipt=receipt or UNSET,
    )


def build_response(
    builder: AnswerBuilder, *, error: WarrenError | None = None, is_cancelled: bool = False
) -> ResponseObject:
    """The response in its current state, or as it ends with ``error`` or the cancellation."""
    rendering, choice = builder.rendering, builder.choices[0]
    usage, fingerprint = builder.usage, builder.system_fingerprint
    writer = ItemWriter(rendering)
    for part in choice.parts:
        writer.write([part])
    if error is not None or is_cancelled:
        writer.cut_off()
        status: ResponseStatus = "cancelled" if is_cancelled else "failed"
        return response_object(rendering, status, writer.items, usage, error, fingerprint)
    if choice.finish_reason is None:
        status = "in_progress" if builder.has_started else "queued"
        return response_object(rendering, status, writer.items)
    status = _status(choice.finish_reason)
    writer.close(is_complete=status == "completed" and not choice.reader.has_open_call)
    return response_object(
        rendering,
        status,
        writer.items,
        usage,
        fingerprint=fingerprint,
        receipt=builder.receipt,
    )


class ResponseEncoder:
    """Renders the stream of a response; its events contain their sequence numbers."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._reader = ChoiceReader(rendering)
        self._writer = ItemWriter(rendering)
        self._counts = TokenCounts()
        self._has_begun = False
        self._finish_reason: FinishReason | None = None
        self.outcome: ResponseObject | None = None
        """The response in the last event, once there is a last event."""

    @property
    def usage(self) -> Usage:
        self._counts.num_reasoning_tokens = self._reader.num_reasoning_tokens
        return self._counts.usage

    def on_start(self, event: Started) -> list[Payload]:
        self._counts.on_start(event)
        return _payloads(self._begin())

    def on_scores(self, event: PromptScores) -> list[Payload]:
        return []

    def on_tokens(self, event: TokenDelta) -> list[Payload]:
        self._counts.on_tokens(event)
        return _payloads(self._tokens(event))

    def on_finish(self, event: Finished) -> list[Payload]:
        self._counts.on_finish(event)
        events = self._tokens(event)
        self._finish_reason = event.finish_reason
        is_complete = _status(event.finish_reason) == "completed" and not self._reader.has_open_call
        return _payloads(events + self._writer.close(is_complete=is_complete))

    def on_failure(self, event: Failed) -> list[Payload]:
        return self._failed(error_of(event))

    def end(self, receipt: str | None = None) -> list[Payload]:
        assert self._finish_reason is not None
        return _payloads([self._ended(_status(self._finish_reason), receipt=receipt)])

    def fail(self, error: WarrenError) -> list[Payload]:
        if isinstance(error, TakenOver | Unavailable):  # the response goes on without this stream
            cause = {"code": error.code, "message": error.message, "param": None}
            return _payloads([*self._begin(), {"type": "error", **cause}])
        return self._failed(error)

    def _begin(self) -> list[StreamEvent]:
        """The events without which OpenAI's clients accept no others, unless they were written."""
        if self._has_begun:
            return []
        self._has_begun = True
        response = response_object(self._rendering, "in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": response} for kind in kinds]

    def _failed(self, error: WarrenError) -> list[Payload]:
        events = [*self._begin(), *self._writer.cut_off()]
        return _payloads([*events, self._ended("failed", error)])

    def _ended(
        self, status: ResponseStatus, error: WarrenError | None = None, receipt: str | None = None
    ) -> StreamEvent:
        fingerprint = system_fingerprint(self._rendering, self._counts)
        self.outcome = response_object(
            self._rendering, status, self._writer.items, self.usage, error, fingerprint, receipt
        )
        return {"type": f"response.{status}", "response": self.outcome}

    def _tokens(self, event: TokenDelta | Finished) -> list[StreamEvent]:
        events = self._writer.write(self._reader.read_parts(event))
        return [_padded(event) for event in events] if self._rendering.is_obfuscated else events


def _payloads(events: Sequence[StreamEvent]) -> list[Payload]:
    return [
        Payload(ENCODER.encode(event)[:-1] + b',"sequence_number":', event["type"], b"}")
        for event in events
    ]


def _padded(event: StreamEvent) -> StreamEvent:
    """Events with a part of a text are padded."""
    if "delta" not in event:
        return event
    said = ENCODER.encode([event["delta"], event.get("logprobs", ())])
    return {**event, "obfuscation": obfuscation(said, len(said) - len(_NOTHING_SAID))}


def _status(reason: FinishReason) -> Literal["completed", "incomplete"]:
    return "completed" if reason == "stop" else "incomplete"


def _response_error(error: WarrenError) -> ResponseError:
    code = _CODES.get(status_of(error).code, "server_error")
    return ResponseError(code, error.message, error.code)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


_ECHO = msgspec.json.Decoder(Echo)
