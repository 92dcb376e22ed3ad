"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API,
which is served as a chat."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, field, structs

from gateway.api.bodies.conversations import (
    ContentPart,
    FunctionDefinition,
    FunctionName,
    NoParameters,
    OfferedTools,
    joined_text,
    offered_tools,
    template_kwargs,
    tool_call,
)
from gateway.api.bodies.parsing import CHAT_NEUTRAL, check_length, refused
from gateway.api.bodies.schemas import Detach, GenerationRequest, NumTokens, StopStrings
from gateway.api.bodies.structured_output import TextFormat
from gateway.api.bodies.tool_choice import (
    ChatFunctionChoice,
    FunctionChoice,
    ToolMode,
    ToolUse,
    tool_use,
)
from gateway.api.render.formats import Endpoint
from shared.errors import InvalidRequest
from shared.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Announcement,
    ChatMessage,
    ChatPrompt,
    Prompt,
    Role,
    Tool,
    ToolCall,
)
from shared.messages.fields import Name, Text

_BILLING_HEADER = "x-anthropic-billing-header:"
"""The beginning of a block of Claude Code's system prompt that differs in each request. The block
would keep the rest of the prompt from the prefix cache."""
_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""The names of a chat's parameters in this API."""
_MODES: Mapping[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(Struct, frozen=True, tag="text"):
    text: Text


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """The assistant's reasoning earlier in the conversation. Its signature is not checked."""

    thinking: Text


class RedactedThinkingBlock(Struct, frozen=True, tag="redacted_thinking"):
    """Reasoning that only its issuer can decrypt. It is left out of the prompt."""


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag="tool_use"):
    """A call that the assistant made earlier."""

    id: Name
    name: Name
    input: dict[str, Any] = {}


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: Name
    content: Text | list[ContentPart] = ""


UserBlock: TypeAlias = TextBlock | ToolResultBlock
AssistantBlock: TypeAlias = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
MessageBlock: TypeAlias = UserBlock | AssistantBlock


class MessagesTurn(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Text | list[MessageBlock]


class MessagesTool(Struct, frozen=True, kw_only=True):
    """A tool of the client. Tools of other types, which Anthropic runs, are left out."""

    name: FunctionName
    type: str | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | NoParameters | None = None

    @property
    def kind(self) -> str:
        return "function" if self.type in (None, "custom") else str(self.type)

    @property
    def function(self) -> FunctionDefinition:
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema
        )


class MessagesToolChoice(Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model thinks; `budget_tokens` has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(TextFormat, frozen=True, kw_only=True):
    schema_param: ClassVar[str] = "output_config.format.schema"

    def wanted_schema(self) -> tuple[Any, str]:
        return self.schema, self.schema_param


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(description="Passed to the chat template.")] | None = None
    format: OutputFormat | None = None


class MessagesRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages``."""

    endpoint: ClassVar[Endpoint] = "messages"
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **CHAT_NEUTRAL,
        "container": (),
        "logprobs": (False,),
        "mcp_servers": (),
        "n": (1,),
        "prompt_logprobs": (),
        "stream_options": (),
        "top_logprobs": (0,),
        "verbosity": (),
    }
    renamed: ClassVar[Mapping[str, str]] = _NAMES
    clamps_max_tokens: ClassVar[bool] = True
    n: ClassVar[int] = 1
    best_of: ClassVar[int] = 0
    echo: ClassVar[bool] = False
    prompt_logprobs: ClassVar[int | None] = None

    max_tokens: NumTokens
    messages: Annotated[tuple[MessagesTurn, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | list[TextBlock] = ""
    stop_sequences: StopStrings = ()
    tools: Annotated[tuple[MessagesTool, ...], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: MessagesToolChoice = MessagesToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    detach: Detach = False

    @classmethod
    def check_names(cls, body: Mapping[str, Any]) -> None:
        for name, ours in cls.renamed.items():
            if name in body:
                raise InvalidRequest(f"{name} is called {ours} here.", param=name)
        super().check_names(body)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Raises `InvalidRequest`."""
        if "" in self.stop_sequences:
            raise refused("stop_sequences", "expected strings that are not empty.")
        return self.stop_sequences

    @property
    def response_format(self) -> TextFormat | None:
        return self.output_config.format

    @property
    def include_reasoning(self) -> bool:
        return self.thinking.type != "disabled"

    @property
    def ignored_tools(self) -> frozenset[str]:
        """The types of the tools that are left out."""
        return frozenset(tool.kind for tool in self.tools) - {"function"}

    def tool_use(self, served: Announcement | None) -> ToolUse | None:
        """Raises `InvalidRequest` and `Unavailable`."""
        is_parallel = not self.tool_choice.disable_parallel_tool_use
        return tool_use(self.offered(), self.choice(), is_parallel=is_parallel, served=served)

    def offered(self) -> OfferedTools:
        """Raises `InvalidRequest`."""
        functions = ((tool.kind, tool.function, f"tools[{k}]") for k, tool in enumerate(self.tools))
        return offered_tools(functions, schema_name="input_schema")

    def choice(self) -> ToolMode | ChatFunctionChoice:
        """Raises `InvalidRequest`."""
        if self.tool_choice.type != "tool":
            return _MODES[self.tool_choice.type]
        if self.tool_choice.name is None:
            raise refused("tool_choice.name", "required, but missing.")
        function = FunctionChoice(self.tool_choice.name)
        return ChatFunctionChoice(function)

    def prompts(self, tools: tuple[Tool, ...]) -> tuple[Prompt, ...]:
        """Raises `InvalidRequest`."""
        messages = conversation_of(self.system, self.messages)
        last = messages[-1]
        is_begun = last.role == "assistant" and not last.tool_calls
        kwargs = {"enable_thinking": self.include_reasoning, **self.chat_template_kwargs}
        return (
            ChatPrompt(
                messages=messages,
                tools=tools,
                template_kwargs=template_kwargs(kwargs, self.output_config.effort),
                add_generation_prompt=not is_begun,
                continue_final_message=is_begun,
            ),
        )

    def token_limit(self) -> int:
        return self.max_tokens

    def num_logprobs(self) -> None:
        """There are none in this API."""


def conversation_of(
    system: str | Sequence[TextBlock], turns: Sequence[MessagesTurn]
) -> tuple[ChatMessage, ...]:
    """The messages of a chat. Raises `InvalidRequest`, which names the invalid part.

    Consecutive turns of the same role become one message, as in Anthropic's API. A system message
    that follows other turns becomes part of the user's turn, because most chat templates allow a
    system message only at the start.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    messages: list[_Joined] = []
    _append(messages, _message("system", filter(None, map(_without_billing, texts))), "system")
    for k, turn in enumerate(turns):
        path = f"messages[{k}].content"
        is_first = not messages or messages[-1].role == "system"
        for message in _messages_of(turn, path, is_first=is_first):
            _append(messages, message, path)
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise refused("messages", f"expected 1 to {MAX_MESSAGES} messages.")
    return tuple(joined.message() for joined in messages)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text


def _messages_of(turn: MessagesTurn, path: str, *, is_first: bool) -> Iterator[ChatMessage]:
    blocks = [TextBlock(turn.content)] if isinstance(turn.content, str) else turn.content
    if turn.role == "assistant":
        yield _assistant_message(blocks, path)
        return
    texts: list[str] = []
    for j, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ToolResultBlock(tool_use_id=call_id, content=content) if turn.role == "user":
                if texts:
                    yield _message("user", texts)
                    texts = []
                if not isinstance(content, str):
                    content = joined_text(content, f"{path}[{j}].content", ("text",))
                yield ChatMessage(role="tool", content=content, tool_call_id=call_id)
            case _:
                raise _misplaced(block, turn.role, f"{path}[{j}]")
    if texts or not blocks:
        yield _message("system" if turn.role == "system" and is_first else "user", texts)


def _assistant_message(blocks: Sequence[MessageBlock], path: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for j, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(tool_call(call_id, name, arguments, f"{path}[{j}].input"))
            case RedactedThinkingBlock():
                pass
            case _:
                raise _misplaced(block, "assistant", f"{path}[{j}]")
    message = _message("assistant", texts)
    thought = "\n".join(thoughts) or None
    return structs.replace(message, tool_calls=tuple(calls), reasoning_content=thought)


def _misplaced(block: MessageBlock, role: str, path: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return refused(f"{path}.type", f"a message of the role '{role}' has no '{kind}'.")


def _message(role: Role, texts: Iterable[str]) -> ChatMessage:
    return ChatMessage(role=role, content="\n".join(texts))


def _append(messages: list["_Joined"], message: ChatMessage, path: str) -> None:
    """Append ``message``, or join it with the last message if both have the same role. Raises
    `InvalidRequest`."""
    if message.role == "system" and not message.content:
        return
    if not (messages and messages[-1].role == message.role != "tool"):
        messages.append(_Joined(message.role, message.tool_call_id))
    messages[-1].add(message, path)


class _Joined:
    """A message of consecutive turns. Each text is copied only once, however many turns there
    are."""

    def __init__(self, role: Role, tool_call_id: str | None) -> None:
        self.role = role
        self._tool_call_id = tool_call_id
        self._content, self._reasoning = _Lines(), _Lines()
        self._calls: list[ToolCall] = []

    def add(self, message: ChatMessage, path: str) -> None:
        """Raises `InvalidRequest`."""
        self._content.add(message.content, path)
        self._reasoning.add(message.reasoning_content or "", path)
        self._calls += message.tool_calls
        if len(self._calls) > MAX_TOOLS:
            raise refused(path, f"more than {MAX_TOOLS} calls in a row.")

    def message(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content=self._content.text(),
            tool_calls=tuple(self._calls),
            tool_call_id=self._tool_call_id,
            reasoning_content=self._reasoning.text() or None,
        )


class _Lines:
    """Joins texts with line feeds and leaves out empty texts."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_chars = 0

    def add(self, text: str, path: str) -> None:
        """Raises `InvalidRequest`."""
        if text:
            self._num_chars += len(text) + bool(self._texts)
            self._texts.append(text)
            check_length(self._num_chars, path)

    def text(self) -> str:
        return "\n".join(self._texts)
