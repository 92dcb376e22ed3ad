"""What a model that has to call a tool may write, in the form that its parser reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.requests.constraints import grammar, json_rule
from shared.messages import Constraint, Tool

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


def forced_calls(
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
