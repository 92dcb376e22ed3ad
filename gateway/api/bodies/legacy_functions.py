"""`functions` and `function_call` of a chat, the older form of `tools`.

A message calls one function at most, and its result is a message of the function.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, structs

from gateway.api.bodies.conversations import (
    CalledFunction,
    FunctionDefinition,
    MessageParam,
    ToolCallParam,
    json_arguments,
    offered_tools,
)
from gateway.api.bodies.parameters import read, refused
from gateway.api.bodies.tool_choice import (
    ChatFunctionChoice,
    FunctionChoice,
    ToolUse,
    tool_use,
)
from shared.errors import InvalidRequest
from shared.messages import MAX_TOOLS, Announcement

_ID_CHARS = 9
"""Mistral's chat template requires as many."""

Functions: TypeAlias = Annotated[tuple[FunctionDefinition, ...], Meta(max_length=MAX_TOOLS)]
FunctionCallMode: TypeAlias = Literal["none", "auto"]


def function_use(
    functions: Functions,
    choice: FunctionCallMode | FunctionChoice | None,
    served: Announcement | None,
) -> ToolUse | None:
    """None: nothing may be called. Raises `InvalidRequest` and `Unavailable`."""
    offered = offered_tools(
        ("function", function, f"functions[{k}]") for k, function in enumerate(functions)
    )
    chosen = ChatFunctionChoice(choice) if isinstance(choice, FunctionChoice) else choice
    try:
        return tool_use(offered, chosen, is_parallel=False, served=served)
    except InvalidRequest as error:
        if error.param not in ("tool_choice", "tools"):
            raise
        param = "function_call" if error.param == "tool_choice" else "functions"
        raise refused(param, error.message.partition(": ")[2]) from None


def with_tool_calls(messages: Sequence[MessageParam]) -> list[MessageParam]:
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
