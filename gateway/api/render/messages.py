"""Renders the answers of /v1/messages, as whole messages and as events of Anthropic's API."""

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import pydantic_core
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.api.render.formats import (
    ENCODER,
    Rendering,
    StreamEvent,
    TokenCounts,
    Usage,
    call_id,
    error_of,
    system_fingerprint,
)
from gateway.errors import messages_error_body
from gateway.log.framing import Payload
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from shared.errors import WarrenError
from shared.messages import Failed, Finished, FinishReason, PromptScores, Started, TokenDelta

StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class TextContent(Struct, tag="text"):
    text: str


class ThinkingContent(Struct, tag="thinking"):
    thinking: str
    signature: str
    """Nothing checks it, but some clients drop blocks without a signature."""


class ToolUseContent(Struct, tag="tool_use"):
    id: str
    name: str
    input: Raw


ContentBlock: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Tokens of the prompt that were not found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Always 0: writing to the prefix cache costs nothing."""
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A whole message, or the beginning of a streamed message."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[ContentBlock] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    system_fingerprint: str | UnsetType = UNSET
    """The same as in chats, once the message has ended. An extension of Warren."""
    receipt: str | UnsetType = UNSET
    """The same as in chats."""


def whole_message(builder: AnswerBuilder) -> AnswerMessage:
    """The answer to a request that does not stream."""
    rendering, choice = builder.rendering, builder.choices[0]
    assert choice.finish_reason is not None
    usage = builder.usage
    pieces = [piece for pieces, _ in choice.parts for piece in pieces]
    reason, sequence = _stop(
        choice.finish_reason, choice.stop_reason, rendering, usage, choice.reader
    )
    return AnswerMessage(
        id=rendering.request_id,
        model=rendering.model,
        content=_content(rendering, pieces),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(usage),
        system_fingerprint=builder.system_fingerprint or UNSET,
        receipt=builder.receipt or UNSET,
    )


class MessageEncoder:
    """Renders the stream of a message."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._reader = ChoiceReader(rendering)
        self._counts = TokenCounts()
        self._has_begun = False
        self._num_blocks = 0
        self._open: type[ContentBlock] | None = None
        """The type of the last block, if it has not ended."""
        self._last: Finished | None = None

    @property
    def usage(self) -> Usage:
        return self._counts.usage

    def on_start(self, event: Started) -> list[Payload]:
        self._counts.on_start(event)
        if self._has_begun:
            return []
        self._has_begun = True
        message = AnswerMessage(
            id=self._rendering.request_id,
            model=self._rendering.model,
            usage=_usage(self.usage),
        )
        return _payloads([{"type": "message_start", "message": message}])

    def on_scores(self, event: PromptScores) -> list[Payload]:
        return []

    def on_tokens(self, event: TokenDelta) -> list[Payload]:
        self._counts.on_tokens(event)
        pieces = self._reader.read(event.text, len(event.token_ids), event.num_chars)
        return _payloads(self._write(pieces))

    def on_finish(self, event: Finished) -> list[Payload]:
        self._counts.on_finish(event)
        self._last = event
        pieces = self._reader.read(event.text, len(event.token_ids), event.num_chars)
        events = self._write(pieces + self._reader.end())
        if not self._num_blocks:
            events = self._begin(TextContent(""))
        return _payloads(events + self._end_block())

    def on_failure(self, event: Failed) -> list[Payload]:
        return self.fail(error_of(event))

    def end(self, receipt: str | None = None) -> list[Payload]:
        last = self._last
        assert last is not None
        reason, sequence = _stop(
            last.finish_reason, last.stop_reason, self._rendering, self.usage, self._reader
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        ended: StreamEvent = {"type": "message_delta", "delta": delta, "usage": _usage(self.usage)}
        if fingerprint := system_fingerprint(self._rendering, self._counts):
            ended["system_fingerprint"] = fingerprint
        if receipt is not None:
            ended["receipt"] = receipt
        return _payloads([ended, {"type": "message_stop"}])

    def fail(self, error: WarrenError) -> list[Payload]:
        body = messages_error_body(error, self._rendering.request_id)
        return [Payload(ENCODER.encode(body), "error")]

    def _write(self, pieces: Sequence[Piece]) -> list[StreamEvent]:
        return [event for piece in merged(pieces) for event in self._write_piece(piece)]

    def _write_piece(self, piece: Piece) -> list[StreamEvent]:
        match piece:
            case Content(text):
                begun = [] if self._open is TextContent else self._begin(TextContent(""))
                return [*begun, self._delta("text", "text", text)]
            case Reasoning(text):
                begun = (
                    [] if self._open is ThinkingContent else self._begin(ThinkingContent("", ""))
                )
                return [*begun, self._delta("thinking", "thinking", text)]
            case CallStart(index, name):
                return self._begin(
                    ToolUseContent(call_id(self._rendering, 0, index, name), name, _EMPTY)
                )
            case CallArguments(_, text) | CallInput(_, text):
                return [self._delta("input_json", "partial_json", text)]

    def _begin(self, block: ContentBlock) -> list[StreamEvent]:
        ended, self._open = self._end_block(), type(block)
        self._num_blocks += 1
        index = self._num_blocks - 1
        return [*ended, {"type": "content_block_start", "index": index, "content_block": block}]

    def _end_block(self) -> list[StreamEvent]:
        if self._open is None:
            return []
        index, signed = self._num_blocks - 1, []
        if self._open is ThinkingContent:
            signed = [self._delta("signature", "signature", _signature(self._rendering, index))]
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": index}]

    def _delta(self, kind: str, name: str, text: str) -> StreamEvent:
        delta = {"type": f"{kind}_delta", name: text}
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def _payloads(events: Sequence[StreamEvent]) -> list[Payload]:
    return [Payload(ENCODER.encode(event), event["type"]) for event in events]


def _content(rendering: Rendering, pieces: Sequence[Piece]) -> list[ContentBlock]:
    """The blocks of a whole message. There is always a block, because clients read the first
    block."""
    blocks: list[ContentBlock] = []
    for piece in merged(pieces):
        match piece:
            case Content(text):
                blocks.append(TextContent(text))
            case Reasoning(text):
                blocks.append(ThinkingContent(text, _signature(rendering, len(blocks))))
            case CallStart(index, name):
                blocks.append(ToolUseContent(call_id(rendering, 0, index, name), name, _EMPTY))
            case CallArguments(_, text) | CallInput(_, text):
                call = blocks[-1]
                assert isinstance(call, ToolUseContent)
                call.input = _input(text)
    return blocks or [TextContent("")]


def _input(arguments: str) -> Raw:
    """The JSON object of a call, as far as it has been generated; Anthropic's clients complete
    streamed JSON in the same way. Anything else is wrapped as Anthropic's documentation
    recommends."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Raw])
        return Raw(arguments.encode())
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True)
        if isinstance(value, dict):
            return Raw(ENCODER.encode(value))
    except (ValueError, RecursionError, OverflowError):
        pass
    return Raw(ENCODER.encode({"INVALID_JSON": arguments}))


def _signature(rendering: Rendering, index: int) -> str:
    """The same each time it is rendered."""
    return hashlib.sha256(f"{rendering.request_id} {index}".encode()).hexdigest()


def _stop(
    reason: FinishReason,
    stop_reason: str | int | None,
    rendering: Rendering,
    usage: Usage,
    reader: ChoiceReader,
) -> tuple[StopReason, str | None]:
    """Why the message ended, and the stop sequence if it ended at a stop sequence."""
    if reason == "length":
        is_at_limit = usage.completion_tokens >= (rendering.max_tokens or 0)
        return "max_tokens" if is_at_limit else "model_context_window_exceeded", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return ("tool_use" if reader.has_called else "end_turn"), None


def _usage(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
    )


_EMPTY = Raw(b"{}")
