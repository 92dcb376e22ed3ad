"""Input items of the Responses API as the messages of a chat."""

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import InvalidRequest
from shared.messages import MAX_MESSAGES

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def conversation_of(instructions: str | None, items: Any) -> "ChatInput":
    """Raises `InvalidRequest` naming what is no text."""
    conversation = ChatInput()
    if instructions:
        conversation.say("system", instructions, "instructions")
    if isinstance(items, str):
        conversation.say("user", items, "input")
        return conversation
    if not isinstance(items, list):
        raise InvalidRequest("input: expected a string or a list of items.", param="input")
    for k, item in enumerate(items[:MAX_MESSAGES]):
        conversation.add(item, f"input[{k}]")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"input: more than {MAX_MESSAGES} items.", param="input")
    return conversation


class ChatInput:
    """Calls and thoughts are items of their own, and parts of one message in a chat."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        """Where each message and its parts stand in the response's body."""
        self._thought: tuple[str, str] | None = None
        """Of the message that comes next, and its path."""
        self._readers: Mapping[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_thought,
        }

    def say(self, role: str, text: str, path: str) -> None:
        self._append({"role": role, "content": text}, path, content=path)

    def add(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        kind = item.get("type", "message")
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise InvalidRequest(
                f"{path}.type: '{str(kind)[:64]}' is not supported.", param=f"{path}.type"
            )
        reader(item, path)

    def _add_message(self, item: dict[str, Any], path: str) -> None:
        content = text_of(item.get("content"), f"{path}.content")
        self._append({"role": item.get("role"), "content": content}, path)

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            self._append(last, path)
        calls = last.setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls"
        self.paths.setdefault(place, path)
        self.paths[f"{place}[{len(calls)}]"] = path
        self.paths[f"{place}[{len(calls)}].id"] = f"{path}.call_id"
        calls.append(call)

    def _add_output(self, item: dict[str, Any], path: str) -> None:
        content, call_id = text_of(item.get("output"), f"{path}.output"), item.get("call_id")
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        self._append(message, path, tool_call_id=f"{path}.call_id", content=f"{path}.output")

    def _add_thought(self, item: dict[str, Any], path: str) -> None:
        if content := item.get("content"):
            self._thought = text_of(content, f"{path}.content"), f"{path}.content"

    def _append(self, message: dict[str, Any], path: str, **fields: str) -> None:
        """``fields``: the paths of those that are not found at ``path`` by their names."""
        place = f"messages[{len(self.messages)}]"
        if self._thought is not None and message["role"] == "assistant":
            message["reasoning_content"], fields["reasoning_content"] = self._thought
        self._thought = None
        self.messages.append(message)
        self.paths[place] = path
        self.paths |= {f"{place}.{name}": field for name, field in fields.items()}


def text_of(content: Any, path: str) -> str:
    """A string, or parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: expected a string or a list of parts.", param=path)
    return "\n".join(_part(part, f"{path}[{k}]") for k, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(
            f"{path}: parts of type '{str(kind)[:64]}' are not supported, only text.", param=path
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text: expected a string.", param=f"{path}.text")
    return text
