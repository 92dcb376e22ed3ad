"""How to render the answer to a request, which its log carries, and OpenAI's formats of an answer:
whole and in chunks, with its usage and errors."""

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.render.logprobs import ChatLogprobs, RenderedPromptLogprobs, TextLogprobs
from gateway.errors import error_body
from gateway.log.cursor import NOT_FOUND, LogFacts, decode_facts
from gateway.log.framing import Payload
from gateway.log.visiting import LogObserver
from gateway.tool_formats import TOOL_FORMATS
from shared import errors, messages
from shared.errors import StreamNotFound, WarrenError
from shared.messages import (
    MAX_CHOICES,
    MAX_PROMPTS,
    Choice,
    Completed,
    Failed,
    Finished,
    SamplingParams,
    Started,
    TokenDelta,
    TokenLogprobs,
)

Endpoint: TypeAlias = Literal["chat", "completions", "responses", "messages"]
ServiceTier: TypeAlias = Literal["default", "flex"]
StreamEvent: TypeAlias = dict[str, Any]
"""The JSON of a server-sent event."""
ENCODER = msgspec.json.Encoder()


DONE = Payload(b"[DONE]", has_place=False)
_PADDED_BYTES = 32
AnswerFinishReason: TypeAlias = messages.FinishReason | Literal["tool_calls", "function_call"]


class ReceiptTerms(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts about the request that the receipt of its answer states, which the log does not
    have."""

    request_sha256: str
    sampling: SamplingParams
    """Without the seed."""
    seed: str
    created_at: float
    num_given_tokens: int = 0


class Rendering(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a log is rendered. The response is a function of this and of the log."""

    endpoint: Endpoint
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""
    num_prompts: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Answers to each prompt that the client requests."""
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] = 0
    """Answers generated for each prompt, if more than requested; otherwise 0."""
    max_tokens: int | None = None
    """The limit of an answer that may end before it because the context does."""
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    is_obfuscated: bool = False
    """Chunks of a stream are padded."""
    echo: bool = False
    logprobs: int | None = None
    """The number of alternatives to each token in the response; None: no logprobs."""
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    """Tokens in logprobs are rendered as ``token_id:17``."""
    hides_stop: bool = False
    """The text ends before a stop string of the request."""
    tool_parser: str | None = None
    """The format of tool calls to parse; None: the text contains none."""
    tool_names: tuple[str, ...] | None = None
    """The functions that may be called; None: any function. A call of another function is text."""
    text_parameters: dict[str, tuple[str, ...]] | None = None
    """The text parameters of each of these functions, by its name, if the parser needs them."""
    custom_tools: tuple[str, ...] = ()
    """The functions that clients know as custom tools."""
    num_earlier_calls: int = 0
    """The calls of the conversation, if the ids of further calls count them."""
    is_forced: bool = False
    """The model is constrained to write only tool calls."""
    has_functions: bool = False
    """A call has the older form of a chat, `function_call`."""
    is_single_call: bool = False
    """Tool calls after the first are dropped."""
    reasoning_parser: str | None = None
    include_reasoning: bool = True
    fingerprint: str | None = None
    service_tier: ServiceTier | None = None
    """The tier in which the request is served, if the request names any tier."""
    is_stored: bool = False
    """The response is stored in the database."""
    receipt: ReceiptTerms | None = None
    """None: the answer has no receipt."""
    echoed: bytes = b"{}"
    """The request's fields that a response of the Responses API repeats, as JSON."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content: there is neither reasoning nor a call to parse."""
        return self.tool_parser is None and self.reasoning_parser is None

    @property
    def num_drawn(self) -> int:
        """Generated choices per prompt."""
        return self.best_of or self.num_choices

    @property
    def total_drawn(self) -> int:
        """Generated choices in the log."""
        return self.num_prompts * self.num_drawn

    def encode(self) -> bytes:
        """Encode for `LogFacts.rendering`."""
        return _RENDERING_ENCODER.encode(self)

    def shown_logprobs(self, event: TokenDelta | Finished | Choice) -> Sequence[TokenLogprobs]:
        """The logprobs of an event's tokens that the client is shown, unless they belong to a stop
        string.

        As in OpenAI's answers, they spell the text: a token that ended the choice without being
        part of it is left out. Tokens as ids are the model's output rather than text, and contain
        it. So does an echo: lm-eval asks for a single token after the prompt, and ignores the last
        of all logprobs.
        """
        return event.logprobs[:-1] if event.has_end_token and self._spells_text else event.logprobs

    @property
    def holds_logprobs(self) -> bool:
        """Whether tokens are not shown before their text is, because it may be a stop string."""
        return self.hides_stop and self._spells_text

    @property
    def _spells_text(self) -> bool:
        return not self.tokens_as_ids and not self.echo


_RENDERING_ENCODER = msgspec.msgpack.Encoder()
_RENDERING_DECODER = msgspec.msgpack.Decoder(Rendering)


def decode_rendering(facts: LogFacts) -> Rendering:
    """Raises `StreamNotFound` if another program wrote it."""
    try:
        rendering = _RENDERING_DECODER.decode(facts.rendering)
    except (msgspec.MsgspecError, RecursionError):
        raise StreamNotFound(NOT_FOUND) from None
    if rendering.total_drawn != facts.num_choices:
        raise StreamNotFound(NOT_FOUND)
    if facts.stream_id:
        return msgspec.structs.replace(rendering, request_id=facts.stream_id)
    return rendering


def rendering_of(context: bytes) -> Rendering:
    """The rendering in a job's context. Raises `StreamNotFound` and `msgspec.MsgspecError` if
    another program wrote it."""
    return decode_rendering(decode_facts(context))


def error_payload(error: WarrenError) -> Payload:
    """The last payload of a failed stream, in the format of chats and completions."""
    return Payload(ENCODER.encode(error_body(error)))


def obfuscation(said: bytes, num_bytes: int) -> str:
    """The padding of a text of ``num_bytes`` to a multiple of 32: an observer of an encrypted
    stream could otherwise guess its words from the sizes of its chunks.

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


class TokenCounts(LogObserver):
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
        """The numerics of the runs that generated the tokens."""

    def on_start(self, event: Started) -> None:
        self._run_numerics = event.numerics
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = sum(event.num_prompt_tokens)

    def on_tokens(self, event: TokenDelta) -> None:
        self._num_tokens += len(event.token_ids)
        self._numerics.add(self._run_numerics)

    def on_finish(self, event: Finished) -> None:
        self._num_tokens += len(event.token_ids)
        self._numerics.add(self._run_numerics)
        self._end(event.choice, event)

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
        # Further choices of a prompt find the prefix of the first choice in the cache.
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
    finish_reason: AnswerFinishReason | None = None
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
    prompt_logprobs: RenderedPromptLogprobs | UnsetType = UNSET


ChunkChoice: TypeAlias = ChatChunkChoice | TextChoice


class ChatCompletion(_AnswerBody, frozen=True, kw_only=True):
    """A whole chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    usage: Usage
    service_tier: ServiceTier | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: RenderedPromptLogprobs | UnsetType = UNSET
    """The same as in vLLM."""
    receipt: str | UnsetType = UNSET
    """A signed receipt, if the request asks for one. An extension of Warren."""


class Completion(_AnswerBody, frozen=True, kw_only=True):
    """A whole completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[TextChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET
    receipt: str | UnsetType = UNSET
    """The same as in chats."""


class Chunk(_AnswerBody, frozen=True, kw_only=True):
    """A part of the stream of a chat or a completion."""

    choices: Sequence[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    """The service tier of a chat; completions have none."""
    system_fingerprint: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    """Padding, if the request asks for it."""
    receipt: str | UnsetType = UNSET
    """The same as in whole answers; the last chunk has it."""


def call_id(rendering: Rendering, choice: int, index: int, name: str) -> str:
    """The id of a call of the function ``name``, the same each time it is rendered. Anthropic's
    endpoint requires letters and digits."""
    form = TOOL_FORMATS.get(rendering.tool_parser or "")
    if form and form.numbered_id and rendering.endpoint != "messages":
        return form.numbered_id(name, rendering.num_earlier_calls + index)
    place = f"{rendering.request_id} {choice} {index}".encode()
    digest = hashlib.sha256(place).hexdigest()
    if form and form.num_id_chars:
        return digest[: form.num_id_chars]
    return f"{'toolu' if rendering.endpoint == 'messages' else 'call'}_{digest[:24]}"


def finish_reason(
    rendering: Rendering, reason: messages.FinishReason | None, *, has_called: bool
) -> AnswerFinishReason | None:
    """The finish reason for clients: ``tool_calls`` or ``function_call`` if the choice ended with
    complete calls."""
    if not has_called or reason != "stop":
        return reason
    return "function_call" if rendering.has_functions else "tool_calls"


def or_unset(stop_reason: str | int | None) -> str | int | UnsetType:
    return UNSET if stop_reason is None else stop_reason
