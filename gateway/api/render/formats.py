"""OpenAI's shapes of an answer, whole and in chunks."""

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from gateway.api.render.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from gateway.api.render.usage import Usage
from gateway.api.rendering import Rendering
from shared import messages

FinishReason: TypeAlias = messages.FinishReason | Literal["tool_calls"]


class _AnswerBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What whole answers and chunks share."""

    id: str
    object: str
    created: int
    model: str


class Function(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """The first of a call bears id, type and name; the others their part of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChatCompletionMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[MessageToolCall] | UnsetType = UNSET


class _Choice(Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    """The stop string or token id that was met, as in vLLM."""


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None = None


class TextChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


ChunkChoice: TypeAlias = ChatChunkChoice | TextChoice


class ChatCompletion(_AnswerBody, frozen=True, kw_only=True):
    """A whole chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """As in vLLM."""


class Completion(_AnswerBody, frozen=True, kw_only=True):
    """A whole completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[TextChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET


class Chunk(_AnswerBody, frozen=True, kw_only=True):
    """A part of the stream of a chat or a completion."""

    choices: Sequence[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


def call_id(rendering: Rendering, choice: int, index: int) -> str:
    """The same for whoever words this call again. Mistral's chat template wants nine characters."""
    name = f"{rendering.request_id} {choice} {index}".encode()
    digest = hashlib.sha256(name).hexdigest()
    return digest[:9] if rendering.tool_parser == "mistral" else f"call_{digest[:24]}"


def finish_reason(reason: messages.FinishReason | None, *, has_called: bool) -> FinishReason | None:
    """A choice that was cut off has not finished its calls."""
    return "tool_calls" if has_called and reason == "stop" else reason


def told(stop_reason: str | int | None) -> str | int | UnsetType:
    return UNSET if stop_reason is None else stop_reason
