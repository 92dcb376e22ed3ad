"""The bodies of chats and completions, and the parameters that several kinds of generations have.

The structs are also the source of the OpenAPI document. The limits of sampling are the same as in
`shared.messages.SamplingParams`; a test compares them. Limits that depend on several parameters are
checked in `submission`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from gateway.api.bodies.conversations import (
    CALLABLE,
    Messages,
    Tools,
    chat_messages,
    chat_tools,
    template_kwargs,
)
from gateway.api.bodies.parsing import CHAT_NEUTRAL, COMPLETION_NEUTRAL, Body, refused
from gateway.api.bodies.structured_output import ResponseFormat
from gateway.api.bodies.tool_choice import (
    ChatToolChoice,
    FunctionCallMode,
    FunctionChoice,
    Functions,
    ToolUse,
    function_use,
    tool_use,
)
from gateway.api.render.formats import Endpoint, ServiceTier
from shared.errors import InvalidRequest, ModelNotFound
from shared.messages import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Announcement,
    ChatMessage,
    ChatPrompt,
    JobClass,
    ModelName,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenIds,
    TokenPrompt,
    Tool,
)
from shared.messages.fields import (
    MAX_TEXT_CHARS,
    NumTopLogprobs,
    Penalty,
    Probability,
    StopString,
    Text,
    TokenId,
)

_DEFAULTS = SamplingParams()

NumTokens: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
MaybeEmpty: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = Annotated[tuple[MaybeEmpty, ...], Meta(max_length=MAX_STOP_STRINGS)]
Biases: TypeAlias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
    Meta(max_length=MAX_BIASES, description="By token id."),
]
NumChoices: TypeAlias = Annotated[
    int, Meta(ge=1, le=MAX_CHOICES, description="The number of answers to each prompt.")
]
PromptLogprobs: TypeAlias = Annotated[
    NumTopLogprobs, Meta(description="As in vLLM. Not supported with `stream`.")
]
Detach: TypeAlias = Annotated[
    bool,
    Meta(description="Continue if the client of a stream disconnects. An extension of Warren."),
]
ReasoningEffort: TypeAlias = Annotated[str, Meta(description="Passed to the chat template.")]
Verbosity: TypeAlias = Annotated[str, Meta(description="Passed to the chat template.")]
TextOrTokens: TypeAlias = (
    Text
    | Annotated[
        list[Text | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(
            min_length=1,
            max_length=MAX_TEXT_CHARS,
            description="Texts, token ids, or lists of token ids.",
        ),
    ]
)
_DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Whether a last chunk contains the usage."""
    continuous_usage_stats: bool | None = None
    """Whether all chunks contain the usage."""
    include_obfuscation: bool | None = None
    """Whether chunks are padded, so that their sizes do not reveal their texts. Off by default."""
    each_token: bool | None = None
    """Whether every token is sent at once. By default, the first tokens are sent at once, and later
    tokens together for each tenth of a second. An extension of Warren."""


class GenerationRequest(Body, frozen=True, kw_only=True):
    """The parameters of all generations."""

    needs_stream: ClassVar[bool] = True
    """Whether `stream_options` are rejected without `stream`."""
    clamps_max_tokens: ClassVar[bool] = False
    """Whether an answer may be shorter than `max_tokens` where the context ends."""

    model: Annotated[str, Meta(description="May be left out if there is one model.")] = ""
    max_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = _DEFAULTS.temperature
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = _DEFAULTS.top_p
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31, description="0 and -1: all tokens.")] = (
        _DEFAULTS.top_k
    )
    min_p: Probability = _DEFAULTS.min_p
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: MaybeEmpty | StopStrings = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = (
        _DEFAULTS.stop_token_ids
    )
    include_stop_str_in_output: bool = False
    ignore_eos: Annotated[
        bool, Meta(description="Continue after the model's end-of-sequence token, as in vLLM.")
    ] = _DEFAULTS.ignore_eos
    min_tokens: NumTokens = _DEFAULTS.min_tokens
    presence_penalty: Penalty = _DEFAULTS.presence_penalty
    frequency_penalty: Penalty = _DEFAULTS.frequency_penalty
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = _DEFAULTS.repetition_penalty
    logit_bias: Biases = _DEFAULTS.logit_bias
    bad_words: Annotated[tuple[StopString, ...], Meta(max_length=MAX_BAD_WORDS)] = (
        _DEFAULTS.bad_words
    )
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    skip_special_tokens: bool = _DEFAULTS.skip_special_tokens
    return_tokens_as_token_ids: bool = False
    structured_outputs: (
        Annotated[
            dict[str, Any],
            Meta(description="One of `json`, `regex`, `choice`, `grammar`, as in vLLM."),
        ]
        | None
    ) = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions, Meta(description="Only with `stream`.")] | None = None
    timeout: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="Seconds until the request ends with an error. An extension of Warren.",
            ),
        ]
        | None
    ) = None
    on_limit: Annotated[
        Literal["refuse", "wait"],
        Meta(
            description="`wait`: wait for the limits of the API key until the request's `timeout` "
            "instead of being answered 429. An extension of Warren."
        ),
    ] = "refuse"
    service_tier: (
        Annotated[
            str,
            Meta(
                description="`flex`: the batch class, behind all other requests. "
                "Other values are ignored."
            ),
        ]
        | None
    ) = None
    user: str | None = None
    receipt: Annotated[
        bool,
        Meta(
            description="End the answer with a signed receipt, which `warren verify` checks. An "
            "extension of Warren."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.model:
            check_model(self.model)
        if self.needs_stream and self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is allowed only when stream is true.", param="stream_options"
            )

    @property
    def job_class(self) -> JobClass:
        return "batch" if self.service_tier == "flex" else "interactive"

    @property
    def tier(self) -> ServiceTier | None:
        """The tier in which the request is served, if the request names any tier."""
        if self.service_tier is None:
            return None
        return "flex" if self.job_class == "batch" else "default"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def include_obfuscation(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    @property
    def each_token(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.each_token)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Raises `InvalidRequest`."""
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if texts == ("",):
            return ()
        if "" in texts:
            raise refused("stop", "expected strings that are not empty.")
        return texts


class ChatParameters(GenerationRequest, frozen=True, kw_only=True):
    """The parameters of chats and responses."""

    echo: ClassVar[bool] = False
    best_of: ClassVar[int] = 0

    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def chat_prompt(
        self,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...],
        effort: str | None,
        verbosity: str | None,
    ) -> ChatPrompt:
        """Raises `InvalidRequest`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise refused("continue_final_message", "not together with add_generation_prompt.")
        is_asked = self.add_generation_prompt is not False
        return ChatPrompt(
            messages=messages,
            tools=tools,
            template_kwargs=template_kwargs(self.chat_template_kwargs, effort, verbosity),
            add_generation_prompt=is_asked and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
        )


def check_model(name: str) -> None:
    """Raise `ModelNotFound` for a name that no model can have."""
    try:
        msgspec.convert(name, ModelName)
    except msgspec.ValidationError:
        raise ModelNotFound(f"The model '{name[:128]}' does not exist.", param="model") from None


def text_prompts(
    prompt: str | Sequence[str | int | list[int]],
    param: str,
    max_prompts: int,
    add_special_tokens: bool = True,
) -> tuple[Prompt, ...]:
    """The prompts of a parameter that is a single prompt or a list. Raises `InvalidRequest`."""
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=add_special_tokens),)
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return (TokenPrompt(token_ids=tuple(token_ids)),)
    if token_ids:
        raise refused(param, "expected a string, token ids, or a list of either.")
    if len(prompt) > max_prompts:
        raise refused(param, f"more than {max_prompts} prompts.")
    return tuple(
        TextPrompt(text=item, add_special_tokens=add_special_tokens)
        if isinstance(item, str)
        else TokenPrompt(token_ids=tuple(item))
        for item in prompt
        if not isinstance(item, int)
    )


class ChatRequest(ChatParameters, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    endpoint: ClassVar[Endpoint] = "chat"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: values
        for name, values in CHAT_NEUTRAL.items()
        if name not in ("function_call", "functions")
    }

    messages: Messages
    max_completion_tokens: (
        Annotated[NumTokens, Meta(description="Overrides `max_tokens`.")] | None
    ) = None
    n: NumChoices = 1
    logprobs: bool = False
    top_logprobs: Annotated[NumTopLogprobs, Meta(description="Only with `logprobs`.")] = 0
    prompt_logprobs: PromptLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools = ()
    tool_choice: ChatToolChoice | None = None
    functions: Annotated[Functions, Meta(description="The older form of `tools`.")] = ()
    function_call: (
        Annotated[
            FunctionCallMode | FunctionChoice,
            Meta(description="The older form of `tool_choice`, for `functions`."),
        ]
        | None
    ) = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    detach: Detach = False

    def tool_use(self, served: Announcement | None) -> ToolUse | None:
        """Raises `InvalidRequest` and `Unavailable`."""
        if self.has_functions:
            return function_use(self.functions, self.function_call, served)
        if not self.tools and not self.tool_choice:
            return None
        offered, is_parallel = chat_tools(self.tools), self.parallel_tool_calls
        return tool_use(offered, self.tool_choice, is_parallel=is_parallel, served=served)

    @property
    def has_functions(self) -> bool:
        """Whether calls have the older form. Raises `InvalidRequest` if they have both."""
        if not self.functions and self.function_call in (None, "none", "auto"):
            return False
        for name in ("tools", "tool_choice"):
            if getattr(self, name):
                raise refused(name, "not together with functions.")
        return True

    @property
    def ignored_tools(self) -> frozenset[str]:
        """The types of the tools that are left out."""
        return frozenset(tool.type for tool in self.tools) - CALLABLE

    def prompts(self, tools: tuple[Tool, ...]) -> tuple[Prompt, ...]:
        """Raises `InvalidRequest`."""
        messages = chat_messages(self.messages)
        return (self.chat_prompt(messages, tools, self.reasoning_effort, self.verbosity),)

    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "only with logprobs.")
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    endpoint: ClassVar[Endpoint] = "completions"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = COMPLETION_NEUTRAL
    include_reasoning: ClassVar[bool] = True

    prompt: TextOrTokens
    n: NumChoices = 1
    best_of: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_CHOICES,
            description="Answers generated for each prompt; the `n` most likely are returned.",
        ),
    ] = 0
    logprobs: (
        Annotated[NumTopLogprobs, Meta(description="Alternatives returned for each token.")]
        | bool
        | None
    ) = None
    prompt_logprobs: PromptLogprobs | None = None
    response_format: ResponseFormat | None = None
    echo: Annotated[bool, Meta(description="Start the text with the prompt.")] = False
    add_special_tokens: bool = True
    detach: Detach = False

    ignored_tools: ClassVar[frozenset[str]] = frozenset()

    def tool_use(self, served: Announcement | None) -> None:
        """A completion has no tools."""

    def prompts(self, tools: tuple[Tool, ...]) -> tuple[Prompt, ...]:
        """Raises `InvalidRequest`."""
        return text_prompts(self.prompt, "prompt", MAX_PROMPTS, self.add_special_tokens)

    def token_limit(self) -> int | None:
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        if self.logprobs is True:
            raise refused("logprobs", "expected `int`, got `bool`")
        # Some clients send chat's `logprobs: false`.
        return None if self.logprobs is False else self.logprobs
