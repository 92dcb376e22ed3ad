"""The prompts that a job continues."""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, field

from shared.messages.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Name,
    Role,
    Text,
    TokenIds,
    UnixTime,
    Wire,
)


class ToolCall(Struct, frozen=True, kw_only=True):
    """A function call by the assistant, earlier in the conversation."""

    id: Name
    name: Name
    arguments: Text
    """A JSON string, as the model wrote it."""


class Tool(Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] = {}
    """A JSON schema."""


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation."""

    role: Role
    content: Text = ""
    name: Name | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_TOOLS)] = ()
    """The calls that this message of the assistant makes."""
    tool_call_id: Name | None = None
    """The call whose result this message is."""
    reasoning_content: Text | None = None
    """The assistant's reasoning before the content."""
    part_chars: Annotated[tuple[Count, ...], Meta(max_length=MAX_MESSAGES)] = ()
    """The lengths of the client's parts, which ``content`` joins with line feeds. Some chat
    templates join them differently. Empty: ``content`` is a single text."""


class ChatPrompt(Wire, frozen=True, kw_only=True, tag="chat", omit_defaults=True):
    """A conversation, to which the worker applies the model's chat template."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] = ()
    template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] = field(default_factory=dict)
    """Additional template variables, such as ``enable_thinking``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Continue the last message instead of answering it."""
    now: UnixTime = 0.0
    """The time for templates that print the date, so that each run of the job has the same prompt.
    0: when the job was created."""


class TextPrompt(Wire, frozen=True, kw_only=True, tag="text", omit_defaults=True):
    """Plain text; the tokenizer adds its special tokens if requested."""

    text: Text
    add_special_tokens: bool = True


class TokenPrompt(Wire, frozen=True, kw_only=True, tag="tokens"):
    """Token ids, used unchanged."""

    token_ids: Annotated[TokenIds, Meta(min_length=1)]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt
