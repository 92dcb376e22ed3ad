"""The bodies of chats and completions.

The structs are also the source of the OpenAPI document. Limits that depend on several parameters
are checked in `gateway.api.bodies.submission`.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from gateway.api.bodies.conversations import CALLABLE, Messages, Tools, chat_messages, chat_tools
from gateway.api.bodies.generations import (
    ChatParameters,
    Detach,
    GenerationRequest,
    NumChoices,
    NumTokens,
    PromptLogprobs,
    ReasoningEffort,
    TextOrTokens,
    Verbosity,
    text_prompts,
)
from gateway.api.bodies.parsing import CHAT_NEUTRAL, COMPLETION_NEUTRAL, refused
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
from gateway.api.rendering import Endpoint
from shared.messages import MAX_CHOICES, MAX_PROMPTS, Announcement, Prompt, Tool
from shared.messages.fields import NumTopLogprobs

_DEFAULT_COMPLETION_TOKENS = 16


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
