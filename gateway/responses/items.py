"""Input items of the Responses API as the messages of a chat."""

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import InvalidRequest
from shared.messages import MAX_MESSAGES

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(instructions: str | None, items: Any) -> list[dict[str, Any]]:
    """A conversation. Raises `InvalidRequest` naming what is no text."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise InvalidRequest("input: expected a string or a list of items.", param="input")
    conversation = _Conversation(messages)
    for k, item in enumerate(items[:MAX_MESSAGES]):
        conversation.add(item, f"input[{k}]")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"input: more than {MAX_MESSAGES} items.", param="input")
    return messages


class _Conversation:
    """Calls and thoughts are items of their own, and parts of one message in a chat."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._thought: str | None = None
        self._readers: Mapping[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_thought,
        }

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
        self._append({"role": item.get("role"), "content": content})

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            self._append(last)
        last.setdefault("tool_calls", []).append(call)

    def _add_output(self, item: dict[str, Any], path: str) -> None:
        content = text_of(item.get("output"), f"{path}.output")
        self._append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})

    def _add_thought(self, item: dict[str, Any], path: str) -> None:
        if content := item.get("content"):
            self._thought = text_of(content, f"{path}.content")

    def _append(self, message: dict[str, Any]) -> None:
        if self._thought is not None and message["role"] == "assistant":
            message["reasoning_content"] = self._thought
        self._thought = None
        self._messages.append(message)


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
