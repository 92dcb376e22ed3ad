"""The parameters that several kinds of generations have, and the limits of each parameter.

The limits of sampling are those of `shared.messages.SamplingParams`; a test compares them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from gateway.api.bodies.conversations import template_kwargs
from gateway.api.bodies.parsing import Body, refused
from gateway.api.rendering import ServiceTier
from shared.errors import InvalidRequest, ModelNotFound
from shared.messages import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
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
    Meta(description="Continue if the client disconnects. An extension of Warren."),
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


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Whether a last chunk contains the usage."""
    continuous_usage_stats: bool | None = None
    """Whether all chunks contain the usage."""
    include_obfuscation: bool | None = None
    """Whether chunks are padded, so that their sizes do not reveal their texts. Off by default."""


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
        """The one in which the request is served, if it names any."""
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
    """The prompts of a parameter that is one prompt or a list. Raises `InvalidRequest`."""
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
