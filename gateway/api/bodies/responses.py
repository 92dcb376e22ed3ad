"""The body of ``POST /v1/responses``, which is served as a chat."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, field

from gateway.api.bodies.conversations import (
    CALLABLE,
    FunctionDefinition,
    FunctionName,
    NoParameters,
    OfferedTools,
    offered_tools,
)
from gateway.api.bodies.custom_tools import AnyInput, BoundInput, CustomDefinition
from gateway.api.bodies.input_items import conversation_of, references
from gateway.api.bodies.parsing import CHAT_NEUTRAL, refused
from gateway.api.bodies.schemas import ChatParameters, NumTokens, ReasoningEffort, Verbosity
from gateway.api.bodies.structured_output import TextFormat
from gateway.api.bodies.tool_choice import (
    AllowedFunctions,
    AllowedTool,
    ChatAllowedTools,
    ChatCustomChoice,
    ChatFunctionChoice,
    ChatToolChoice,
    FunctionChoice,
    ToolMode,
    ToolUse,
    tool_use,
)
from gateway.api.render.formats import Endpoint
from shared.errors import InvalidRequest, RequestError, StreamExpired, StreamNotFound
from shared.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Announcement,
    Prompt,
    Tool,
)
from shared.messages.fields import NumTopLogprobs, Text

_NAMES: Mapping[str, str] = {
    "detach": "background",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""The names of a chat's parameters in this API."""
_LOGPROBS = "message.output_text.logprobs"

StoredId: TypeAlias = Annotated[str, Meta(max_length=64)]


class ResponseTool(Struct, frozen=True, kw_only=True):
    """A function or a custom tool. Tools of other types are left out."""

    type: str
    name: FunctionName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | NoParameters | None = None
    """A JSON schema."""
    format: AnyInput | BoundInput | None = None
    """The format of the input of a custom tool."""

    def definition(self, path: str) -> FunctionDefinition | CustomDefinition | None:
        """None: the tool is left out. Raises `InvalidRequest`."""
        if self.type not in CALLABLE:
            return None
        if self.name is None:
            raise refused(f"{path}.name", "required, but missing.")
        if self.type == "custom":
            return CustomDefinition(
                name=self.name, description=self.description, format=self.format
            )
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters
        )


class NamedFunction(Struct, frozen=True, kw_only=True, tag="function"):
    """The function that must be called."""

    name: str | None = None
    function: FunctionChoice | None = None
    """The same as in a chat."""


class NamedCustomTool(Struct, frozen=True, kw_only=True, tag="custom"):
    """The custom tool that must be called."""

    name: str


class AllowedResponseTool(Struct, frozen=True, kw_only=True):
    """Tools that are neither functions nor custom tools are left out."""

    type: str
    name: str | None = None


class AllowedTools(Struct, frozen=True, kw_only=True, tag="allowed_tools"):
    """The functions and custom tools that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[AllowedResponseTool, ...], Meta(max_length=MAX_TOOLS)]


class TextOptions(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    effort: ReasoningEffort | None = None


class ConversationParam(Struct, frozen=True, kw_only=True):
    id: StoredId


class ResponsesRequest(ChatParameters, frozen=True, kw_only=True):
    """The body of ``POST /v1/responses``."""

    endpoint: ClassVar[Endpoint] = "responses"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **CHAT_NEUTRAL,
        "context_management": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
    }
    renamed: ClassVar[Mapping[str, str]] = _NAMES
    needs_stream: ClassVar[bool] = False
    n: ClassVar[int] = 1
    prompt_logprobs: ClassVar[int | None] = None

    input: (
        Text
        | Annotated[
            list[Any],
            Meta(
                max_length=MAX_MESSAGES,
                description="Messages, calls, their outputs, reasoning, and references to items "
                "of stored responses.",
            ),
        ]
    ) = field(default_factory=list)
    instructions: Text | None = None
    max_output_tokens: NumTokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[
        NumTopLogprobs, Meta(description=f"Only with `include`: `{_LOGPROBS}`.")
    ] = 0
    tools: Annotated[tuple[ResponseTool, ...], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: ToolMode | NamedFunction | NamedCustomTool | AllowedTools | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: tuple[Any, ...] = ()
    background: Annotated[
        bool, Meta(description="Answer at once, and continue without the client.")
    ] = False
    store: (
        Annotated[
            bool,
            Meta(
                description="Store the response, so that others can continue it. `true` also "
                "continues a stream if its client disconnects."
            ),
        ]
        | None
    ) = None
    previous_response_id: (
        Annotated[StoredId, Meta(description="The stored response that this one continues.")] | None
    ) = None
    conversation: (
        Annotated[
            StoredId | ConversationParam,
            Meta(
                description="The conversation that this response continues, and which receives its "
                "input and output."
            ),
        ]
        | None
    ) = None
    truncation: Annotated[
        Literal["auto", "disabled"],
        Meta(
            description="`auto`: leave out the oldest items of a conversation that exceeds the "
            "model's context, instead of refusing it."
        ),
    ] = "disabled"
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def check_names(cls, body: Mapping[str, Any]) -> None:
        for name, ours in cls.renamed.items():
            if body.get(name, False) is not False:
                raise InvalidRequest(f"{name} is called {ours} here.", param=name)
        super().check_names(body)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background and self.store is False:
            raise refused("store", "a background response must be stored.")
        if self.conversation is not None and self.store is False:
            raise refused("store", "a response in a conversation must be stored.")
        if self.conversation is not None and self.previous_response_id is not None:
            raise refused("previous_response_id", "cannot be combined with conversation.")
        for k, name in enumerate(self.include):
            if name not in (_LOGPROBS, "reasoning.encrypted_content"):
                raise refused(f"include[{k}]", "not supported.")

    @property
    def detach(self) -> bool:
        return self.background or bool(self.store)

    @property
    def conversation_id(self) -> str | None:
        said = self.conversation
        return said.id if isinstance(said, ConversationParam) else said

    @property
    def is_continued(self) -> bool:
        """Whether a part of its prompt is stored. Raises `InvalidRequest`."""
        return (
            self.previous_response_id is not None
            or self.conversation is not None
            or bool(references(self.input))
        )

    @property
    def needs_store(self) -> bool:
        """Whether it cannot be answered without a database. Raises `InvalidRequest`."""
        return bool(self.store) or self.is_continued

    def is_stored(self, *, default: bool) -> bool:
        """``default``: for a request that does not say."""
        if self.store is not None:
            return self.store
        return default or self.background or self.conversation is not None

    @property
    def response_format(self) -> TextFormat | None:
        return self.text.format

    def tool_use(self, served: Announcement | None) -> ToolUse | None:
        """Raises `InvalidRequest` and `Unavailable`."""
        is_parallel = self.parallel_tool_calls
        return tool_use(self.offered(), self.choice(), is_parallel=is_parallel, served=served)

    def offered(self) -> OfferedTools:
        """Raises `InvalidRequest`."""
        paths = [f"tools[{k}]" for k in range(len(self.tools))]
        return offered_tools(
            (tool.type, tool.definition(path), path)
            for tool, path in zip(self.tools, paths, strict=True)
        )

    @property
    def ignored_tools(self) -> frozenset[str]:
        """The types of the tools that are left out."""
        return frozenset(tool.type for tool in self.tools) - CALLABLE

    def prompts(self, tools: tuple[Tool, ...]) -> tuple[Prompt, ...]:
        """Raises `InvalidRequest`."""
        messages = conversation_of(self.instructions, self.input)
        effort, verbosity = self.reasoning.effort, self.text.verbosity
        return (self.chat_prompt(messages, tools, effort, verbosity),)

    def token_limit(self) -> int | None:
        limit = self.max_output_tokens
        return self.max_tokens if limit is None else limit

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if _LOGPROBS in self.include else None

    def choice(self) -> ChatToolChoice | None:
        """Raises `InvalidRequest`."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            names = [None if one.name is None else FunctionChoice(one.name) for one in choice.tools]
            allowed = tuple(
                AllowedTool(type=tool.type, function=name, custom=name)
                for tool, name in zip(choice.tools, names, strict=True)
            )
            return ChatAllowedTools(AllowedFunctions(choice.mode, allowed))
        if isinstance(choice, NamedCustomTool):
            return ChatCustomChoice(FunctionChoice(choice.name))
        if not isinstance(choice, NamedFunction):
            return choice
        function = choice.function if choice.name is None else FunctionChoice(choice.name)
        if function is None:
            raise refused("tool_choice", "expected none, auto, required or one function.")
        return ChatFunctionChoice(function)


@contextmanager
def with_response_errors() -> Iterator[None]:
    """Raise errors of chats and streams with the parameter names and terms of the Responses API."""
    try:
        yield
    except (StreamNotFound, StreamExpired):
        raise StreamNotFound(
            "There is no such response, or its events are no longer kept."
        ) from None
    except RequestError as error:
        param = _NAMES.get(error.param or "", error.param)
        raise type(error)(error.message, param=param) from None
