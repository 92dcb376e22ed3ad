"""What the client wants continued, as the prompts of a job in the making.

The lists are cut one beyond their limit, so that the limit's own check refuses them and a huge body
does not hold up the event loop before.
"""

from typing import Any, TypeAlias

import msgspec

from gateway.api.bodies.json_values import check_json
from shared.errors import InvalidRequest
from shared.messages import MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS

UncheckedPrompt: TypeAlias = dict[str, Any]


def chat_prompt(messages: list[Any]) -> UncheckedPrompt:
    """The one prompt of a conversation. Raises `InvalidRequest`."""
    return {
        "type": "chat",
        "messages": [
            _message(message, f"messages[{k}]")
            for k, message in enumerate(messages[: MAX_MESSAGES + 1])
        ],
    }


def template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of what the chat template is given. Raises `InvalidRequest`."""
    check_json(kwargs or {}, "chat_template_kwargs")
    return dict(kwargs or {})


def completion_prompts(
    prompt: Any,
    *,
    add_special_tokens: bool = True,
    name: str = "prompt",
    max_prompts: int = MAX_PROMPTS,
) -> list[UncheckedPrompt]:
    """One prompt, or each of a list; ``name`` is the client's. Raises `InvalidRequest`."""
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    return [
        _completion_prompt(item, add_special_tokens, name)
        for item in ([prompt] if is_one else prompt[: max_prompts + 1])
    ]


def _completion_prompt(prompt: Any, add_special_tokens: bool, name: str) -> UncheckedPrompt:
    if isinstance(prompt, str):
        return {"type": "text", "text": prompt, "add_special_tokens": add_special_tokens}
    if isinstance(prompt, list):
        return {"type": "tokens", "token_ids": prompt}
    raise InvalidRequest(f"{name}: expected a string, token ids, or a list of either.", param=name)


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path}: expected an object.", param=path)
    for name in ("function_call", "audio"):
        if message.get(name):
            raise InvalidRequest(f"{path}.{name} is not supported.", param=f"{path}.{name}")
    names = ("role", "name", "tool_call_id", "reasoning_content")
    known = {name: message[name] for name in names if message.get(name) is not None}
    if calls := message.get("tool_calls"):
        known["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    return known | {"content": _content(message, f"{path}.content")}


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}: expected a list.", param=path)
    return [_call(call, f"{path}[{k}]") for k, call in enumerate(calls[: MAX_TOOLS + 1])]


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}: expected the call of a function.", param=path)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return {
        "id": call.get("id") or "",
        "name": function.get("name"),
        "arguments": arguments or "{}",
    }


def _content(message: dict[str, Any], path: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text(part, f"{path}[{k}]") for k, part in enumerate(content))
    if content is None and message.get("role") == "assistant":
        return ""
    raise InvalidRequest(f"{path}: expected a string or a list of parts.", param=path)


def _text(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{path}: expected an object with a type.", param=path)
    if part["type"] != "text":
        kind = part["type"][:64]
        raise InvalidRequest(
            f"{path}: parts of type '{kind}' are not supported, only text.", param=path
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: expected a string.", param=f"{path}.text")
    text: str = part["text"]
    return text
