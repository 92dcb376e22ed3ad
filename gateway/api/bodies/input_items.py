"""Input items of the Responses API, their conversion to the messages of a chat, and the form in
which they are stored."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, structs

from gateway.api.bodies.conversations import ContentPart, joined_text, json_arguments, tool_call
from gateway.api.bodies.parsing import read, refused
from shared.messages import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Role
from shared.messages.fields import Name, Text

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")

TextParts: TypeAlias = Text | list[ContentPart]


class MessageItem(Struct, frozen=True, kw_only=True):
    role: Role
    content: TextParts


class FunctionCall(Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier."""

    call_id: Name | None = None
    name: Name
    arguments: Text | dict[str, Any] | None = None
    """JSON, or the object itself."""


class FunctionCallOutput(Struct, frozen=True, kw_only=True):
    call_id: Name | None = None
    output: TextParts


class CustomToolCall(Struct, frozen=True, kw_only=True):
    """A call of a tool that is given a text. In a chat it calls a function with a single
    argument."""

    call_id: Name | None = None
    name: Name
    input: Text

    def function_call(self, path: str) -> FunctionCall:
        """``path`` is the item's. Raises `InvalidRequest`."""
        arguments = json_arguments({"input": self.input}, f"{path}.input")
        return FunctionCall(call_id=self.call_id, name=self.name, arguments=arguments)


class CustomToolCallOutput(FunctionCallOutput, frozen=True, kw_only=True):
    """The output of a custom tool."""


class ReasoningItem(Struct, frozen=True, kw_only=True):
    """The assistant's reasoning before its next message or call. Items of OpenAI's models have a
    summary in place of it."""

    content: TextParts | None = None
    summary: TextParts = ""

    def text(self, path: str) -> str:
        """``path`` is the item's. Raises `InvalidRequest`."""
        summary = _text(self.summary, f"{path}.summary")
        return _text(self.content or "", f"{path}.content") or summary


class ItemReference(Struct, frozen=True, kw_only=True):
    """Stands for an item of an earlier response."""

    id: Name


InputItem: TypeAlias = (
    MessageItem
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | ReasoningItem
)

_KINDS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


def conversation_of(
    instructions: str | None, items: str | Sequence[Any]
) -> tuple[ChatMessage, ...]:
    """Convert items to messages: calls and reasoning are separate items, but parts of a message in
    a chat.

    Raises `InvalidRequest`, which names the invalid item.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return (*messages, ChatMessage(role="user", content=items))
    thought: str | None = None
    for k, value in enumerate(items):
        path = f"input[{k}]"
        item = _item(value, path)
        if isinstance(item, ReasoningItem):
            thought = item.text(path) or thought
            continue
        if isinstance(item, CustomToolCall):
            item = item.function_call(path)
        last = messages[-1] if messages else None
        if isinstance(item, FunctionCall) and last is not None and last.role == "assistant":
            messages[-1] = _with_call(last, item, path)
            continue
        message = _message(item, path)
        if message.role == "assistant":
            message = structs.replace(message, reasoning_content=thought)
        thought = None
        messages.append(message)
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise refused("input", f"expected 1 to {MAX_MESSAGES} messages.")
    return tuple(messages)


def references(items: str | Sequence[Any]) -> dict[int, str]:
    """The ids of the items that the input only refers to, by their places. Raises
    `InvalidRequest`."""
    if isinstance(items, str):
        return {}
    return {
        k: read(value, ItemReference, f"input[{k}]").id
        for k, value in enumerate(items)
        if isinstance(value, dict) and value.get("type") == "item_reference"
    }


def stored_items(items: str | Sequence[Any], param: str = "input") -> list[dict[str, Any]]:
    """The items as OpenAI returns them, each with an id of its own. Raises `InvalidRequest`, which
    names the invalid item of the parameter ``param``."""
    values = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return [_stored(value, f"{param}[{k}]") for k, value in enumerate(values)]


def _stored(value: Any, path: str) -> dict[str, Any]:
    match _item(value, path):
        case MessageItem(role=role, content=content):
            _text(content, f"{path}.content")
            kind = "output_text" if role == "assistant" else "input_text"
            parts = _stored_parts(content, kind)
            item = {"role": role, "content": parts, "status": "completed"}
            return {"id": _new_id("msg"), "type": "message", **item}
        case FunctionCall() as called:
            call = tool_call(called.call_id, called.name, called.arguments, f"{path}.arguments")
            item = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            return {"id": _new_id("fc"), "type": "function_call", **item, "status": "completed"}
        case CustomToolCall(call_id=call_id, name=name, input=text) as given:
            given.function_call(path)
            item = {"call_id": call_id or "", "name": name, "input": text}
            return {"id": _new_id("ctc"), "type": "custom_tool_call", **item, "status": "completed"}
        case FunctionCallOutput(call_id=call_id, output=output) as made:
            _text(output, f"{path}.output")
            what = output if isinstance(output, str) else _stored_parts(output, "input_text")
            item = {"call_id": call_id or "", "output": what}
            item["status"] = "completed"
            if isinstance(made, CustomToolCallOutput):
                return {"id": _new_id("ctco"), "type": "custom_tool_call_output", **item}
            return {"id": _new_id("fco"), "type": "function_call_output", **item}
        case ReasoningItem(content=content, summary=summary) as thought:
            thought.text(path)
            item = {
                "summary": _stored_parts(summary or [], "summary_text"),
                "content": _stored_parts(content or [], "reasoning_text"),
            }
            return {"id": _new_id("rs"), "type": "reasoning", **item}


def _stored_parts(content: TextParts, kind: str) -> list[dict[str, Any]]:
    parts = [ContentPart(kind, content)] if isinstance(content, str) else content
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [
        {"type": "refusal", "refusal": part.refusal}
        if part.type == "refusal"
        else {"type": kind, "text": part.text, **more}
        for part in parts
    ]


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _item(value: Any, path: str) -> InputItem:
    if not isinstance(value, dict):
        raise refused(path, "expected an object.")
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refused(f"{path}.type", f"'{str(kind)[:64]}' is not supported.")
    return read(value, _KINDS[kind], path)


def _message(item: MessageItem | FunctionCall | FunctionCallOutput, path: str) -> ChatMessage:
    match item:
        case MessageItem(role=role, content=content):
            return ChatMessage(role=role, content=_text(content, f"{path}.content"))
        case FunctionCall():
            return _with_call(ChatMessage(role="assistant"), item, path)
        case FunctionCallOutput(call_id=call_id, output=output):
            content = _text(output, f"{path}.output")
            return ChatMessage(role="tool", tool_call_id=call_id, content=content)


def _with_call(message: ChatMessage, item: FunctionCall, path: str) -> ChatMessage:
    if len(message.tool_calls) == MAX_TOOLS:
        raise refused(path, f"more than {MAX_TOOLS} calls in a row.")
    call = tool_call(item.call_id, item.name, item.arguments, f"{path}.arguments")
    return structs.replace(message, tool_calls=(*message.tool_calls, call))


def _text(content: TextParts, path: str) -> str:
    return content if isinstance(content, str) else joined_text(content, path, _TEXT_PARTS)
