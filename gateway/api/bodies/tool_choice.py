"""Which tools a chat may call: from its body, checked, to what its job and its reader need."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.api.bodies.json_values import check_json, misfit
from gateway.api.bodies.structured_output import Wanted, grammar, json_constraint, json_rule
from gateway.text.tools import TOOL_PARSERS
from shared.errors import InvalidRequest, Unavailable
from shared.messages import MAX_GRAMMAR_CHARS, MAX_TOOLS, Announcement, Constraint, Tool

MAX_CALLS = 16
"""Of one answer. OpenAI and vLLM know no limit, and a small model that cannot stop calling calls
until its tokens are spent (vllm#50399), while nobody was seen to ask for so many at once."""
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("{}", '"<tool_call>\\n" object "\\n</tool_call>"', '"\\n"'),
    "llama3_json": ("{}", "object", '"; "'),
    "mistral": ('"[" {} "]"', "object", '", "'),
}
"""All calls, one call, and what stands between two."""
_DEFINITIONS = ("$defs", "definitions")
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class ToolUse(NamedTuple):
    """What a request may call."""

    tools: tuple[Tool, ...]
    parser: str
    is_single: bool
    constraint: Constraint | None
    """Of a request that has to call."""
    schemas: tuple[Wanted, ...] = ()
    """What the constraint has of each tool."""


def tool_use(
    tools: list[Any] | None,
    tool_choice: Any,
    *,
    is_parallel: bool,
    served: Announcement | None,
) -> ToolUse | None:
    """None: nothing may be called. Raises `InvalidRequest`, and `Unavailable` while no worker is
    there to tell how its model writes calls."""
    if not tools and tool_choice is None:
        return None
    known = read_tools(tools)
    chosen = _chosen(tool_choice, known)
    if not known or chosen is None:
        return None
    if served is None:
        raise Unavailable("No worker of this model is there to tell how it calls tools.")
    parser = served.tool_parser
    if parser is None or parser not in TOOL_PARSERS:
        raise InvalidRequest(f"tools: the model '{served.model}' calls none.", param="tools")
    is_single = not is_parallel or isinstance(tool_choice, dict)
    constraint, schemas = None, tuple[Wanted, ...]()
    if tool_choice == "required" or isinstance(tool_choice, dict):
        constraint = _forced_calls(
            parser, chosen, is_single=is_single, reasoning_parser=served.reasoning_parser
        )
        if len(constraint.source) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"tools: longer than {MAX_GRAMMAR_CHARS} characters together.", param="tools"
            )
        schemas = tuple(_schema(tool, f"tools[{known.index(tool)}]") for tool in chosen)
    return ToolUse(tuple(known), parser, is_single, constraint, schemas)


def read_tools(tools: list[Any] | None) -> list[Tool]:
    """The tools of a body. Raises `InvalidRequest`."""
    known = [_tool(tool, f"tools[{k}]") for k, tool in enumerate((tools or [])[: MAX_TOOLS + 1])]
    if len(known) > MAX_TOOLS:
        raise InvalidRequest(f"tools: more than {MAX_TOOLS}.", param="tools")
    return known


def _chosen(tool_choice: Any, tools: list[Tool]) -> list[Tool] | None:
    """The tools that may be called; None if none may."""
    if tool_choice in (None, "auto", "required", "none") and not isinstance(tool_choice, dict):
        if tool_choice == "required" and not tools:
            raise InvalidRequest("tool_choice: there are no tools.", param="tool_choice")
        return None if tool_choice == "none" else tools
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, dict) or tool_choice.get("type") != "function":
        raise InvalidRequest(
            "tool_choice: expected none, auto, required or one function.", param="tool_choice"
        )
    named = [tool for tool in tools if tool.name == function.get("name")]
    if not named:
        raise InvalidRequest("tool_choice: no such tool.", param="tool_choice")
    return named


def _schema(tool: Tool, path: str) -> Wanted:
    param = f"{path}.function.parameters"
    return Wanted(param, json_constraint({"type": "object", **tool.parameters}, param))


def _tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{path}.type: only functions are supported.", param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function: expected an object.", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name or not _NAME_CHARS.issuperset(name):
        path = f"{path}.function.name"
        raise InvalidRequest(
            f"{path}: expected letters, digits, dots, dashes and underscores.", param=path
        )
    parameters = function.get("parameters") or {}
    check_json(parameters, f"{path}.function.parameters")
    try:
        return msgspec.convert(
            {
                "name": name,
                "description": function.get("description"),
                "parameters": parameters,
            },
            Tool,
        )
    except msgspec.ValidationError as error:
        reason, place = misfit(error)
        param = f"{path}.function{place}"
        raise InvalidRequest(f"{param}: {reason}", param=param) from None


def _forced_calls(
    parser: str, tools: Sequence[Tool], *, is_single: bool, reasoning_parser: str | None
) -> Constraint:
    """One call or several, `MAX_CALLS` at most, of ``tools``, after what thought there may be."""
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
