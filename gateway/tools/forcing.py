"""What a model that has to call a tool may write, in the form that its parser reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.requests.constraints import grammar
from shared.messages import Constraint, Tool

_FORMS: Mapping[str, tuple[str, str]] = {
    "hermes": (
        'answer: call ("\\n" call)*\ncall: "<tool_call>\\n" object "\\n</tool_call>"',
        'answer: "<tool_call>\\n" object "\\n</tool_call>"',
    ),
    "llama3_json": ('answer: object ("; " object)*', "answer: object"),
    "mistral": ('answer: "[" object (", " object)* "]"', 'answer: "[" object "]"'),
}
"""Of several calls, and of one."""
_DEFINITIONS = ("$defs", "definitions")


def forced_calls(
    parser: str, tools: Sequence[Tool], *, is_single: bool, reasoning_parser: str | None
) -> Constraint:
    """One call or several of ``tools``, after what thought there may be."""
    rules = [_FORMS[parser][is_single]]
    rules.append("object: " + " | ".join(f"object_{k}" for k in range(len(tools))))
    arguments = "parameters" if parser == "llama3_json" else "arguments"
    for k, tool in enumerate(tools):
        schema = msgspec.json.encode(_call_schema(tool, arguments)).decode()
        rules.append(f"object_{k}: %json {schema}")
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
