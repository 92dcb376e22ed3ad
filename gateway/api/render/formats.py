"""OpenAI's formats of an answer, whole and in chunks, with its usage and errors."""

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.render.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from gateway.api.rendering import Rendering, ServiceTier
from gateway.errors import error_body
from gateway.log.cursor import LogEvent
from gateway.log.framing import Payload
from gateway.text.tools.delimited import kimi_call_id
from shared import errors, messages
from shared.errors import WarrenError
from shared.messages import Choice, Completed, Failed, Finished, Started, TokenDelta

ENCODER = msgspec.json.Encoder()


DONE = Payload(b"[DONE]", has_place=False)
_PADDED_BYTES = 32
FinishReason: TypeAlias = messages.FinishReason | Literal["tool_calls", "function_call"]


def error_payload(error: WarrenError) -> Payload:
    """The last payload of a failed stream, in the format of chats and completions."""
    return Payload(ENCODER.encode(error_body(error)))


def obfuscation(said: bytes, num_bytes: int) -> str:
    """What pads the ``num_bytes`` of a text to a multiple of 32: whoever observes the sizes of the
    chunks of an encrypted stream could otherwise guess its words.

    It is derived from ``said``, so that a stream is rendered again with the same bytes, and a proxy
    cannot compress it.
    """
    return base64.b64encode(hashlib.blake2s(said).digest()).decode()[: -num_bytes % _PADDED_BYTES]


def error_of(event: Failed) -> WarrenError:
    return errors.from_code(event.code, event.message, event.param)


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Always 0: writing to the prefix cache costs nothing."""


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Tokens that the worker's drafts had predicted: they took no step of their own."""


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TokenCounts:
    """Counts the tokens of a log. Each prompt counts once, even if it has several choices or
    attempts."""

    def __init__(self, num_drawn: int = 1) -> None:
        """``num_drawn``: the number of generated choices per prompt."""
        self.num_reasoning_tokens = 0
        self._num_drawn = num_drawn
        self._num_prompt_tokens: int | None = None
        self._num_tokens = 0
        self._num_predicted = 0
        self._cached: defaultdict[int, list[int]] = defaultdict(list)
        self._run_numerics = ""
        self._numerics: set[str] = set()
        """Of the runs that generated the tokens."""

    def read(self, event: LogEvent) -> None:
        match event:
            case TokenDelta():
                self._num_tokens += len(event.token_ids)
                self._numerics.add(self._run_numerics)
            case Finished():
                self._num_tokens += len(event.token_ids)
                self._numerics.add(self._run_numerics)
                self._end(event.choice, event)
            case Started():
                self._run_numerics = event.numerics
                if self._num_prompt_tokens is None:
                    self._num_prompt_tokens = sum(event.num_prompt_tokens)

    def take(self, completed: Completed) -> None:
        """Read the answer to a job of mode ``final``."""
        firsts = completed.choices[:: self._num_drawn]
        self._num_prompt_tokens = sum(choice.num_prompt_tokens for choice in firsts)
        for number, choice in enumerate(completed.choices):
            self._num_tokens += len(choice.token_ids)
            self._end(number, choice)

    @property
    def has_mixed_numerics(self) -> bool:
        """Whether workers with several numerics have generated the tokens."""
        return len(self._numerics - {""}) > 1

    @property
    def usage(self) -> Usage:
        num_prompt_tokens = self._num_prompt_tokens or 0
        # Further choices of a prompt find the first one's prefix in the cache.
        num_cached_tokens = sum(map(min, self._cached.values()))
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                self.num_reasoning_tokens, self._num_predicted
            ),
        )

    def _end(self, number: int, choice: Finished | Choice) -> None:
        self._num_predicted += choice.num_predicted_tokens
        self._cached[number // self._num_drawn].append(choice.num_cached_tokens)


def system_fingerprint(rendering: Rendering, counts: TokenCounts) -> str | None:
    """Names the model's weights, and says if another worker with the same seed may generate another
    text."""
    if rendering.fingerprint and counts.has_mixed_numerics:
        return f"{rendering.fingerprint}-mixed"
    return rendering.fingerprint


class _AnswerBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of whole answers and chunks."""

    id: str
    object: str
    created: int
    model: str


class Function(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomTool(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """Part of a call. The first part has id, type and name; each part has some of the arguments, or
    of the input of a custom tool."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: CustomTool | UnsetType = UNSET


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function", "custom"] = "function"
    function: Function | UnsetType = UNSET
    custom: CustomTool | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET
    """The older form of a call."""


class ChatCompletionMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[MessageToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET
    """The older form of a call."""


class _Choice(Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    """The stop string or token id that ended the choice, as in vLLM."""


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
    service_tier: ServiceTier | UnsetType = UNSET
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
    service_tier: ServiceTier | UnsetType = UNSET
    """Of a chat."""
    system_fingerprint: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    """Padding, if the request asks for it."""


def call_id(rendering: Rendering, choice: int, index: int, name: str) -> str:
    """The id of a call of the function ``name``, the same each time it is rendered. Mistral's chat
    template requires nine characters, Anthropic letters and digits."""
    if rendering.tool_parser == "kimi_k2" and rendering.endpoint != "messages":
        return kimi_call_id(name, rendering.num_earlier_calls + index)
    place = f"{rendering.request_id} {choice} {index}".encode()
    digest = hashlib.sha256(place).hexdigest()
    if rendering.tool_parser == "mistral":
        return digest[:9]
    return f"{'toolu' if rendering.endpoint == 'messages' else 'call'}_{digest[:24]}"


def finish_reason(
    rendering: Rendering, reason: messages.FinishReason | None, *, has_called: bool
) -> FinishReason | None:
    """The finish reason for clients: ``tool_calls`` or ``function_call`` if the choice ended with
    complete calls."""
    if not has_called or reason != "stop":
        return reason
    return "function_call" if rendering.has_functions else "tool_calls"


def or_unset(stop_reason: str | int | None) -> str | int | UnsetType:
    return UNSET if stop_reason is None else stop_reason
