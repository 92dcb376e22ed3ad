"""The messages and tools of a chat's body, and their conversion to the prompt of a job."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct, structs

from gateway.api.bodies.custom_tools import INPUT, CalledCustom, CustomDefinition
from gateway.api.bodies.parsing import check_json, check_length, read, refused
from gateway.tool_formats import TOOL_FORMATS
from shared.errors import InvalidRequest
from shared.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    ChatPrompt,
    Prompt,
    Role,
    Tool,
    ToolCall,
)
from shared.messages.fields import Name, Text

_MAX_TEMPLATE_KWARGS = 64
_MAX_SHOWN_CHARS = 64
_MAX_ID_CHARS = 256
_ID_CHARS = 9
"""Mistral's chat template requires as many."""
CALLABLE = frozenset({"function", "custom"})
"""The types of tools that are not left out."""

FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}\Z")]
NoParameters: TypeAlias = Annotated[list[Any], Meta(max_length=0)]
"""Some clients send an empty object as a list."""


class ContentPart(Struct, frozen=True):
    """Part of a message: text, or a refusal of the assistant."""

    type: str
    text: Any = None
    refusal: Any = None

    @property
    def said(self) -> Any:
        return self.refusal if self.type == "refusal" else self.text


class CalledFunction(Struct, frozen=True, kw_only=True):
    name: Name
    arguments: Text | dict[str, Any] | None = None
    """JSON, or the object itself."""


class ToolCallParam(Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier in the conversation."""

    id: Name | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def call(self, path: str) -> ToolCall:
        """Raises `InvalidRequest`."""
        if self.type == "custom" and self.custom is not None:
            given = {INPUT: self.custom.input}
            return tool_call(self.id, self.custom.name, given, f"{path}.custom.input")
        if self.type == "function" and self.function is not None:
            called, param = self.function, f"{path}.function.arguments"
            return tool_call(self.id, called.name, called.arguments, param)
        raise refused(f"{path}.{self.type}", "required, but missing.")


class MessageParam(Struct, frozen=True, kw_only=True):
    role: Role
    content: Text | list[ContentPart] | None = None
    """A string, or parts of type `text`."""
    name: Name | None = None
    tool_calls: Annotated[list[ToolCallParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    """The text of the assistant that replaces an answer."""
    function_call: Any = None
    audio: Any = None


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | NoParameters | None = None
    """A JSON schema."""

    def tool(self, path: str) -> Tool:
        """The tool in the prompt; ``path`` is the path of the schema in the body. Raises
        `InvalidRequest`."""
        parameters = dict(self.parameters or {})
        check_json(parameters, path)
        if parameters.get("type", "object") != "object":
            kind = msgspec.json.encode(parameters["type"]).decode()[:_MAX_SHOWN_CHARS]
            raise InvalidRequest(
                f"Invalid schema for function '{self.name}': schema must be a JSON Schema of "
                f"'type: \"object\"', got 'type: {kind}'.",
                param=path,
            )
        return Tool(name=self.name, description=self.description, parameters=parameters)


class ChatTool(Struct, frozen=True, kw_only=True):
    """Tools that are neither functions nor custom tools are left out."""

    type: str
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @property
    def definition(self) -> FunctionDefinition | CustomDefinition | None:
        return self.custom if self.type == "custom" else self.function


class OfferedTools(NamedTuple):
    """The tools of a body."""

    functions: tuple[Tool, ...]
    paths: tuple[str, ...]
    """Where the body has the schema of each function."""
    others: Mapping[str, str]
    """The types of the tools that are left out, by the path of the type."""
    custom: frozenset[str] = frozenset()
    """The names of the functions that are custom tools."""


Messages: TypeAlias = Annotated[
    tuple[MessageParam, ...], Meta(min_length=1, max_length=MAX_MESSAGES)
]
Tools: TypeAlias = Annotated[tuple[ChatTool, ...], Meta(max_length=MAX_TOOLS)]


def chat_messages(messages: Sequence[MessageParam]) -> tuple[ChatMessage, ...]:
    """The messages of a job. Raises `InvalidRequest`."""
    if any(message.function_call for message in messages):  # the older form of tool calls
        messages = _with_tool_calls(messages)
    return tuple(_message(message, f"messages[{k}]") for k, message in enumerate(messages))


def chat_tools(tools: Sequence[ChatTool]) -> OfferedTools:
    """Raises `InvalidRequest`."""
    return offered_tools(
        (tool.type, tool.definition, f"tools[{k}].{tool.type}") for k, tool in enumerate(tools)
    )


def offered_tools(
    tools: Iterable[tuple[str, FunctionDefinition | CustomDefinition | None, str]],
    schema_name: str = "parameters",
) -> OfferedTools:
    """The tools of a request. ``tools`` has the type and definition of each, and the definition's
    path in the body; ``schema_name`` is the API's name for the schema of a function. Raises
    `InvalidRequest`."""
    functions: dict[str, Tool] = {}
    others: dict[str, str] = {}
    custom: set[str] = set()
    for k, (kind, definition, path) in enumerate(tools):
        if kind not in CALLABLE:
            others[f"tools[{k}].type"] = kind
        elif definition is None:
            raise refused(path, "required, but missing.")
        else:
            is_custom = isinstance(definition, CustomDefinition)
            schema_path = f"{path}.{'format' if is_custom else schema_name}"
            functions[schema_path] = definition.tool(schema_path)
            custom |= {definition.name} if is_custom else set()
    return OfferedTools(tuple(functions.values()), tuple(functions), others, frozenset(custom))


def tool_call(
    call_id: str | None, name: str, arguments: str | dict[str, Any] | None, param: str
) -> ToolCall:
    """``arguments`` are as for `json_arguments`. Raises `InvalidRequest`."""
    return ToolCall(id=call_id or "", name=name, arguments=json_arguments(arguments, param))


def json_arguments(arguments: str | dict[str, Any] | None, param: str) -> str:
    """``arguments``: JSON, or the object itself, which is at ``param`` in the body. Raises
    `InvalidRequest`."""
    if isinstance(arguments, dict):
        check_json(arguments, param)
        arguments = msgspec.json.encode(arguments).decode()
    arguments = arguments or "{}"
    check_length(len(arguments), param)
    return arguments


def template_kwargs(
    kwargs: dict[str, Any], effort: str | None = None, verbosity: str | None = None
) -> dict[str, Any]:
    """The variables of the chat template. Raises `InvalidRequest`."""
    check_json(kwargs, "chat_template_kwargs")
    if effort is not None:
        kwargs = {"reasoning_effort": effort, **kwargs}
    if effort == "none":
        kwargs = {"enable_thinking": False, **kwargs}
    if verbosity is not None:
        kwargs = {"verbosity": verbosity, **kwargs}
    if len(kwargs) > _MAX_TEMPLATE_KWARGS:
        raise refused("chat_template_kwargs", f"more than {_MAX_TEMPLATE_KWARGS} variables.")
    return kwargs


def _with_tool_calls(messages: Sequence[MessageParam]) -> list[MessageParam]:
    """The messages with calls and results in the newer form. Raises `InvalidRequest`."""
    newer: list[MessageParam] = []
    last_id: str | None = None
    for k, message in enumerate(messages):
        if message.function_call:
            path = f"messages[{k}].function_call"
            if message.role != "assistant" or message.tool_calls:
                raise refused(path, "only in a message of the assistant without tool_calls.")
            call = read(message.function_call, CalledFunction, path)
            arguments = json_arguments(call.arguments, f"{path}.arguments")
            call = structs.replace(call, arguments=arguments)
            last_id = hashlib.sha256(f"{k}".encode()).hexdigest()[:_ID_CHARS]
            calls = [ToolCallParam(id=last_id, function=call)]
            message = structs.replace(message, function_call=None, tool_calls=calls)
        elif message.role == "function" and last_id is not None:
            message = structs.replace(message, role="tool", tool_call_id=last_id)
        newer.append(message)
    return newer


def _message(message: MessageParam, path: str) -> ChatMessage:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise refused(f"{path}.{name}", "not supported.")
    return ChatMessage(
        role=message.role,
        content=_content(message, f"{path}.content"),
        name=message.name,
        tool_calls=tuple(
            call.call(f"{path}.tool_calls[{k}]") for k, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
        part_chars=_part_chars(message.content),
    )


def _part_chars(content: str | Sequence[ContentPart] | None) -> tuple[int, ...]:
    """The lengths of the parts, which are texts."""
    if content is None or isinstance(content, str) or len(content) > MAX_MESSAGES:
        return ()
    return tuple(len(part.said) for part in content)


def _content(message: MessageParam, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    is_answer = message.role == "assistant"
    if content is not None:
        return joined_text(content, path, ("text", "refusal") if is_answer else ("text",))
    if is_answer:
        return message.refusal or ""
    raise refused(path, "expected a string or a list of parts.")


def joined_text(parts: Sequence[ContentPart], path: str, kinds: Sequence[str]) -> str:
    """The text of parts, whose types must be among ``kinds``. Raises `InvalidRequest`."""
    for k, part in enumerate(parts):
        if part.type not in kinds:
            kind = part.type[:64]
            raise refused(f"{path}[{k}]", f"parts of type '{kind}' are not supported, only text.")
        if not isinstance(part.said, str):
            name = "refusal" if part.type == "refusal" else "text"
            raise refused(f"{path}[{k}].{name}", "expected a string.")
    text = "\n".join(part.said for part in parts)
    check_length(len(text), path)
    return text


def in_form(prompt: Prompt, tool_parser: str | None) -> Prompt:
    """The prompt for a model that writes calls in this format."""
    form = TOOL_FORMATS.get(tool_parser or "")
    if not form or not form.numbered_id or not isinstance(prompt, ChatPrompt):
        return prompt
    numbered = _with_numbered_ids(prompt.messages, form.numbered_id)
    return structs.replace(prompt, messages=tuple(numbered))


def _with_numbered_ids(
    messages: Sequence[ChatMessage], id_of: Callable[[str, int], str]
) -> Iterator[ChatMessage]:
    """The messages with the ids that the chat template needs, whatever ids the calls had."""
    ids: dict[str | None, str] = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            ids[call.id] = id_of(call.name, number)[-_MAX_ID_CHARS:]
            calls.append(structs.replace(call, id=ids[call.id]))
            number += 1
        result_of = ids.get(message.tool_call_id, message.tool_call_id)
        yield structs.replace(message, tool_calls=tuple(calls), tool_call_id=result_of)
