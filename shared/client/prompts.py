"""What a program asks for: texts, token ids and conversations as prompts, and prompts as jobs."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest, UndecodableMessage
from shared.messages import (
    JSON,
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Tool,
    decode_job,
    encode,
)

PromptLike: TypeAlias = str | Sequence[int] | TextPrompt | TokenPrompt | ChatPrompt
"""A text, which gets the tokenizer's special tokens, or token ids, which are used as they are."""
MessageLike: TypeAlias = Mapping[str, Any] | ChatMessage
"""A message of a conversation, such as ``{"role": "user", "content": "Hello"}``."""
ToolLike: TypeAlias = Mapping[str, Any] | Tool
"""A tool, as OpenAI's chat completions describe it, or only its ``function``."""
Chats: TypeAlias = Sequence[MessageLike] | Sequence[Sequence[MessageLike]]
"""A conversation or several."""

_Part = TypeVar("_Part", bound=Struct)


def prompts_of(given: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """The prompts that a program gives as a prompt or as a sequence of prompts. Raises
    `InvalidRequest`."""
    if not isinstance(given, Struct) and not given:
        raise InvalidRequest("There is no prompt.", param="prompt")
    is_one = isinstance(given, str | Struct) or all(isinstance(part, int) for part in given)
    several: Any = [given] if is_one else given
    return [_prompt(one) for one in several]


def chat_prompts(
    given: Chats,
    tools: Sequence[ToolLike] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts of a conversation or of several. Raises `InvalidRequest`."""
    if not given:
        raise InvalidRequest("There is no message.", param="messages")
    is_one = isinstance(given[0], Mapping | ChatMessage)
    conversations: Any = [given] if is_one else given
    shared_tools = tuple(_converted(_flat(tool), Tool, "tools") for tool in tools)
    return [
        ChatPrompt(
            messages=tuple(_message(message) for message in conversation),
            tools=shared_tools,
            template_kwargs=dict(template_kwargs or {}),
        )
        for conversation in conversations
    ]


def checked(job: GenerationJob) -> GenerationJob:
    """The job after the checks that a worker makes. Raises `InvalidRequest`."""
    try:
        return decode_job(encode(job, JSON), JSON)
    except (UndecodableMessage, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidRequest(f"The request is invalid: {error}") from None


def _prompt(given: PromptLike) -> Prompt:
    match given:
        case TextPrompt() | TokenPrompt() | ChatPrompt():
            return given
        case str():
            return TextPrompt(text=given)
        case _:
            return TokenPrompt(token_ids=tuple(given))


def _message(given: MessageLike) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    calls = given.get("tool_calls") or ()
    return _converted(
        {
            **given,
            "tool_calls": [_flat(call) for call in calls],
            "content": given.get("content") or "",
        },
        ChatMessage,
        "messages",
    )


def _flat(given: Any) -> Any:
    """A tool or call in OpenAI's form, with the fields of its ``function`` moved up to it."""
    if not isinstance(given, Mapping) or "function" not in given:
        return given
    outer = {name: value for name, value in given.items() if name not in ("function", "type")}
    return {**outer, **given["function"]}


def _converted(given: Any, kind: type[_Part], param: str) -> _Part:
    if isinstance(given, Mapping) and (unknown := set(given) - set(kind.__struct_fields__)):
        raise InvalidRequest(f"{param} has the unknown field {min(unknown)!r}.", param=param)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param} is invalid: {error}", param=param) from None
