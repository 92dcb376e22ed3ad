"""The tools that a chat may call: validation, and what the job and the reader of its log need."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from gateway.api.bodies.parameters import refused
from gateway.api.bodies.structured_output import Wanted, grammar, json_constraint, json_rule
from gateway.text.tools import TOOL_PARSERS
from shared.errors import Unavailable
from shared.messages import MAX_GRAMMAR_CHARS, Announcement, Constraint, Tool

MAX_CALLS = 16
"""Maximum number of calls in an answer. OpenAI and vLLM have no limit, and a small model may repeat
calls until it reaches its token limit (vllm#50399). No request is known to need so many."""
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("{}", '"<tool_call>\\n" object "\\n</tool_call>"', '"\\n"'),
    "llama3_json": ("{}", "object", '"; "'),
    "mistral": ('"[" {} "]"', "object", '", "'),
}
"""The grammar of all calls, of one call, and of the separator of two calls."""
_DEFINITIONS = ("$defs", "definitions")


class FunctionChoice(Struct, frozen=True):
    name: str


class ChatFunctionChoice(Struct, frozen=True, kw_only=True):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionChoice


ToolMode: TypeAlias = Literal["none", "auto", "required"]
ChatToolChoice: TypeAlias = ToolMode | ChatFunctionChoice


class ToolUse(NamedTuple):
    """The tools that a request may call."""

    tools: tuple[Tool, ...]
    parser: str
    is_single: bool
    constraint: Constraint | None
    """The constraint of a request that must call a tool."""
    schemas: tuple[Wanted, ...] = ()
    """The part of the constraint for each tool."""


def tool_use(
    tools: tuple[Tool, ...],
    choice: ToolMode | ChatFunctionChoice | None,
    *,
    is_parallel: bool,
    served: Announcement | None,
    path: str = ".function",
) -> ToolUse | None:
    """None if no tool may be called. ``path`` is the path of each tool's name in the body.

    Raises `InvalidRequest`, and `Unavailable` if there is no worker, because only workers know the
    format in which their model writes calls.
    """
    chosen = _chosen(choice, tools)
    if not chosen:
        return None
    if served is None:
        raise Unavailable("No worker of this model is there to tell how it calls tools.")
    parser = served.tool_parser
    if parser is None or parser not in TOOL_PARSERS:
        raise refused("tools", f"the model '{served.model}' calls none.")
    is_one = isinstance(choice, ChatFunctionChoice)
    is_single = is_one or not is_parallel
    if choice != "required" and not is_one:
        return ToolUse(tools, parser, is_single, None)
    constraint = _forced_calls(
        parser, chosen, is_single=is_single, reasoning_parser=served.reasoning_parser
    )
    if len(constraint.source) > MAX_GRAMMAR_CHARS:
        raise refused("tools", f"longer than {MAX_GRAMMAR_CHARS} characters together.")
    schemas = tuple(_schema(tool, f"tools[{tools.index(tool)}]{path}") for tool in chosen)
    return ToolUse(tools, parser, is_single, constraint, schemas)


def _chosen(
    choice: ToolMode | ChatFunctionChoice | None, tools: tuple[Tool, ...]
) -> tuple[Tool, ...]:
    """The tools that may be called."""
    if isinstance(choice, ChatFunctionChoice):
        tools = tuple(tool for tool in tools if tool.name == choice.function.name)
        if not tools:
            raise refused("tool_choice", "no such tool.")
    if choice == "required" and not tools:
        raise refused("tool_choice", "there are no tools.")
    return () if choice == "none" else tools


def _schema(tool: Tool, path: str) -> Wanted:
    param = f"{path}.parameters"
    return Wanted(param, json_constraint({"type": "object", **tool.parameters}, param))


def _forced_calls(
    parser: str, tools: Sequence[Tool], *, is_single: bool, reasoning_parser: str | None
) -> Constraint:
    """The grammar of one or several calls of ``tools``, at most `MAX_CALLS`, after optional
    reasoning."""
    form, call, between = _FORMS[parser]
    calls = "call" if is_single else f"call ({between} call){{0,{MAX_CALLS - 1}}}"
    rules = [f"answer: {form.format(calls)}", f"call: {call}"]
    rules.append("object: " + " | ".join(f"object_{k}" for k in range(len(tools))))
    arguments = "parameters" if parser == "llama3_json" else "arguments"
    for k, tool in enumerate(tools):
        rules.append(f"object_{k}: {json_rule(_call_schema(tool, arguments))}")
    return grammar("\n".join(rules), reasoning_parser)


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    # References in a tool's schema start at its root, which is no longer one.
    definitions = {name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters}
    parameters = {
        name: value for name, value in tool.parameters.items() if name not in _DEFINITIONS
    }
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments: {"type": "object", **parameters}},
        "required": ["name", arguments],
        "additionalProperties": False,
        **definitions,
    }
