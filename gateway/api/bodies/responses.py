"""The body of ``POST /v1/responses``, and the chat that it stands for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import Field, ValidationError, WithJsonSchema

from gateway.api.bodies.input_items import ChatInput, conversation_of
from gateway.api.bodies.parameters import refuse_unsupported
from gateway.api.bodies.schemas import Body, ChatRequest, misshapen
from shared.errors import InvalidRequest, RequestError, StreamExpired, StreamNotFound

NAMES: Mapping[str, str] = {
    "detach": "background",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What a chat's parameters are called here."""
_PARTS: Mapping[str, str] = {
    "response_format.json_schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
}
_INPUT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "object", "description": "Messages, calls and their outputs."},
        },
    ]
}
_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "A JSON schema."},
    },
}
_LOGPROBS = "message.output_text.logprobs"
_TOLERATED = (_LOGPROBS, "reasoning.encrypted_content")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "truncation": ("disabled",),
}
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
)

Input: TypeAlias = Annotated[Any, WithJsonSchema(_INPUT)]
Tools: TypeAlias = Annotated[list[Any] | None, WithJsonSchema({"type": "array", "items": _TOOL})]


class ResponsesRequest(Body):
    """Unknown parameters are taken as a chat's."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, description=f"With `include`: `{_LOGPROBS}`.")
    tools: Tools = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = Field(
        None, description="`format`: `text`, `json_object` or `json_schema` with a schema."
    )
    reasoning: dict[str, Any] | None = Field(None, description="`effort`.")
    include: Annotated[list[Any] | None, WithJsonSchema({"type": "array"})] = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    background: bool = Field(False, description="Answer at once, and go on without the client.")
    store: bool | None = Field(
        None, description="Keep the response for a while; null: where it is a background one."
    )
    metadata: dict[str, Any] | None = None
    user: str | None = None

    @cached_property
    def conversation(self) -> ChatInput:
        """What the chat consists of. Raises `InvalidRequest`."""
        return conversation_of(self.instructions, self.input)

    @property
    def paths(self) -> dict[str, str]:
        """Where the parts of the chat's body stand in this one. Raises `InvalidRequest`."""
        tools = {f"tools[{k}].function": f"tools[{k}]" for k in range(len(self.tools or []))}
        return {**self.conversation.paths, **tools}

    def chat(self) -> ChatRequest:
        """The chat that this is. Raises `InvalidRequest`."""
        extra = self.model_extra or {}
        self._refuse_unsupported(extra)
        if self.background and self.store is False:
            raise InvalidRequest("store: a background response is stored.", param="store")
        for k, name in enumerate(self.include or []):
            if name not in _TOLERATED:
                raise InvalidRequest(f"include[{k}]: not supported.", param=f"include[{k}]")
        with in_own_words():
            try:
                return ChatRequest.model_validate({**extra, **self._chat_fields()})
            except ValidationError as error:
                raise misshapen(error) from None

    def echoed(self) -> bytes:
        """What the response repeats, as JSON."""
        said = {name: getattr(self, name) for name in _ECHOED}
        return msgspec.json.encode(
            {
                **said,
                "background": self.background,
                "store": bool(self.store or self.background),
                "metadata": self.metadata or {},
                "tools": self.tools or [],
                "tool_choice": self.tool_choice or "auto",
                "text": self.text or {"format": {"type": "text"}},
                "reasoning": self.reasoning or {"effort": None, "summary": None},
                "previous_response_id": None,
                "truncation": "disabled",
            }
        )

    def _refuse_unsupported(self, extra: Mapping[str, Any]) -> None:
        for name, ours in NAMES.items():
            if extra.get(name, False) is not False:
                raise InvalidRequest(f"{name} is called {ours} here.", param=name)
        for name, neutral in _NEUTRAL.items():
            if name in extra and extra[name] not in neutral:
                raise InvalidRequest(f"{name} is not supported.", param=name)
        refuse_unsupported({k: v for k, v in extra.items() if k not in _NEUTRAL}, is_chat=True)
        if (self.text or {}).get("verbosity") not in (None, "medium"):
            param = "text.verbosity"
            raise InvalidRequest(
                f"{param} is not supported, but for its neutral value.", param=param
            )

    def _chat_fields(self) -> dict[str, Any]:
        wants_logprobs = _LOGPROBS in (self.include or [])
        return {
            "model": self.model,
            "messages": self.conversation.messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool, f"tools[{k}]") for k, tool in enumerate(self.tools or [])],
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format((self.text or {}).get("format")),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": wants_logprobs,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
            "stream": self.stream,
            "detach": bool(self.background or self.store),
            "user": self.user,
        }


def _tool(tool: Any, path: str) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{path}.type: only functions are supported.", param=f"{path}.type")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and "name" in choice and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(wanted: Any) -> Any:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


@contextmanager
def in_own_words(paths: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise errors about a chat or a stream as errors about a response. ``paths``: where the parts
    of the chat's body stand in the response's."""
    try:
        yield
    except StreamNotFound:
        raise StreamNotFound("There is no such response.") from None
    except StreamExpired:
        raise StreamExpired("This response is no longer kept.") from None
    except RequestError as error:
        raise _renamed(error, {**NAMES, **_PARTS, **(paths or {})}) from None


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    param = error.param or ""
    known = [name for name in names if f"{param}.".startswith((f"{name}.", f"{name}["))]
    if not known:
        return error
    longest = max(known, key=len)
    ours = names[longest] + param.removeprefix(longest)
    message = error.message
    if message.startswith(param):
        message = ours + message.removeprefix(param)
    return type(error)(message, param=ours)
