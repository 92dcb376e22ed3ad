"""The tools that a chat may call: validation, and what the job and the reader of its log need."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from gateway.api.bodies.conversations import OfferedTools
from gateway.api.bodies.parameters import refused
from gateway.api.bodies.structured_output import (
    Wanted,
    grammar,
    json_constraint,
    json_rule,
    rule_of,
)
from gateway.text.tools import TAGGED, TOOL_PARSERS
from gateway.text.tools.hermes import CLOSE, OPEN
from shared.errors import Unavailable
from shared.grammars import CALL_CAPTURE, CALLS_TAG
from shared.messages import MAX_GRAMMAR_CHARS, MAX_TOOLS, Announcement, Constraint, Tool

MAX_CALLS = 16
"""Maximum number of calls in an answer. OpenAI and vLLM have no limit, and a small model may repeat
calls until it reaches its token limit (vllm#50399). No request is known to need so many."""
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("{}", '"<tool_call>\\n" object "\\n</tool_call>"', '"\\n"'),
    "llama3_json": ("{}", "object", '"; "'),
    "mistral": ('"[" {} "]"', "object", '", "'),
}
"""All calls, one call, and what stands between two."""
_DEFAULT_PARSER = "hermes"
_TAGS: Mapping[str, str] = {"mistral": CALLS_TAG}
"""What stands before calls, if the model does not have to call."""
_DEFINITIONS = ("$defs", "definitions")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class FunctionChoice(Struct, frozen=True):
    name: str


class ChatFunctionChoice(Struct, frozen=True, tag="function"):
    """The one function to call."""

    function: FunctionChoice


class AllowedTool(Struct, frozen=True, kw_only=True):
    """Tools that are no functions are left out."""

    type: str
    function: FunctionChoice | None = None


class AllowedFunctions(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[AllowedTool, ...], Meta(max_length=MAX_TOOLS)]


class ChatAllowedTools(Struct, frozen=True, tag="allowed_tools"):
    """The functions that may be called; the prompt has the others, too, so that its prefix stays
    the same."""

    allowed_tools: AllowedFunctions

    @property
    def names(self) -> frozenset[str]:
        """Of the functions. Raises `InvalidRequest`."""
        functions = [tool.function for tool in self.allowed_tools.tools if tool.type == "function"]
        if None in functions:
            raise refused("tool_choice", "expected the name of each function.")
        return frozenset(function.name for function in functions if function is not None)


ToolMode: TypeAlias = Literal["none", "auto", "required"]
ChatToolChoice: TypeAlias = ToolMode | ChatFunctionChoice | ChatAllowedTools


class ToolUse(NamedTuple):
    """The tools that a request may call."""

    tools: tuple[Tool, ...]
    parser: str
    is_single: bool
    is_required: bool
    """Whether the model has to call."""
    callable: Mapping[str, Tool]
    """The tools of which it may call any, by the place of their schemas in the body."""

    def text_parameters(self) -> dict[str, tuple[str, ...]] | None:
        """Of each callable tool the parameters that are text, if the parser needs them."""
        if self.parser not in TAGGED:
            return None
        return {tool.name: _text_parameters(tool) for tool in self.callable.values()}

    def schemas(self) -> tuple[Wanted, ...]:
        """What the arguments of each of these have to match. Raises `InvalidRequest`."""
        return tuple(_schema(tool, place) for place, tool in self.callable.items())

    def constraint(
        self, reasoning_parser: str | None, answer: Constraint | None = None
    ) -> Constraint:
        """Calls, or an ``answer``, if there is one, after what thought there may be. Raises
        `InvalidRequest`."""
        if self.parser not in _FORMS:
            raise refused(
                "tool_choice",
                "this model's tool calls cannot be combined with a format; use none or required.",
            )
        rules = _calls(self.parser, self.callable.values(), is_single=self.is_single)
        if answer is None:
            rules = ["answer: calls", *rules]
        else:
            tag = _TAGS.get(self.parser, "")
            rules = [f"answer: {tag} calls | said", f"said: {rule_of(answer)}", *rules]
        constraint = grammar("\n".join(rules), reasoning_parser)
        if len(constraint.source) > MAX_GRAMMAR_CHARS:
            raise refused("tools", f"longer than {MAX_GRAMMAR_CHARS} characters together.")
        return constraint

    def constraint_after_tag(self, reasoning_parser: str | None) -> Constraint | None:
        """Any text, in which the opening tag of a call is followed by one of these tools. None if
        calls have no such tag, the tools are too long, or a thought may contain the tag."""
        if self.parser != "hermes" or reasoning_parser is not None:
            return None
        call = f'opened blank? object blank? "{CLOSE}"'
        rules = [f"answer: {call} | text" if self.is_single else f"answer: ({call})* text"]
        rules += [f"opened[lazy]: /(?s:.*){OPEN}/", "text: /(?s:.*)/", r"blank: /\s/"]
        rules += _objects(self.parser, self.callable.values())
        constraint = grammar("\n".join(rules), None)
        return constraint if len(constraint.source) <= MAX_GRAMMAR_CHARS else None


def tool_use(
    offered: OfferedTools,
    choice: ChatToolChoice | None,
    *,
    is_parallel: bool,
    served: Announcement | None,
) -> ToolUse | None:
    """None: nothing may be called.

    Raises `InvalidRequest`, and `Unavailable` if there is no worker, because only workers know the
    format in which their model writes calls.
    """
    chosen = callable_tools(choice, offered)
    if not chosen:
        return None
    if served is None:
        raise Unavailable("No worker of this model is available to say how it calls tools.")
    is_one = isinstance(choice, ChatFunctionChoice)
    is_required = is_one or _mode(choice) == "required"
    parser = served.tool_parser
    if parser is None or parser not in TOOL_PARSERS:
        if not is_required:
            raise refused("tools", f"the model '{served.model}' does not support tool calls.")
        parser = _DEFAULT_PARSER
    if is_required and parser not in _FORMS:
        parser = (
            _DEFAULT_PARSER  # a grammar makes the model write calls in a form that is not its own
        )
    return ToolUse(
        offered.functions,
        parser,
        is_single=is_one or not is_parallel,
        is_required=is_required,
        callable=chosen,
    )


def callable_tools(choice: ChatToolChoice | None, offered: OfferedTools) -> Mapping[str, Tool]:
    """The tools that may be called, by the place of their schemas. Raises `InvalidRequest`."""
    tools = dict(zip(offered.places, offered.functions, strict=True))
    names = _names(choice)
    if names is not None:
        tools = {place: tool for place, tool in tools.items() if tool.name in names}
        if names - {tool.name for tool in tools.values()}:
            raise refused("tool_choice", "no such tool.")
    if _mode(choice) == "required":
        for place, kind in offered.others.items() if names is None else ():
            raise refused(place, f"'{kind[:64]}' is not supported.")
        if not tools:
            raise refused("tool_choice", "there are no tools.")
    return {} if choice == "none" else tools


def _names(choice: ChatToolChoice | None) -> frozenset[str] | None:
    """The functions that are chosen by name, if they are."""
    match choice:
        case ChatFunctionChoice(function):
            return frozenset({function.name})
        case ChatAllowedTools():
            return choice.names
        case _:
            return None


def _mode(choice: ChatToolChoice | None) -> object:
    return choice.allowed_tools.mode if isinstance(choice, ChatAllowedTools) else choice


def _schema(tool: Tool, param: str) -> Wanted:
    return Wanted(param, json_constraint(_parameters(tool), param))


def _calls(parser: str, tools: Collection[Tool], *, is_single: bool) -> list[str]:
    """The rules of one call or several, `MAX_CALLS` at most, of ``tools``."""
    form, call, between = _FORMS[parser]
    calls = "call" if is_single else f"call ({between} call){{0,{MAX_CALLS - 1}}}"
    return [f"calls: {form.format(calls)}", f"call: {call}", *_objects(parser, tools)]


def _objects(parser: str, tools: Collection[Tool]) -> list[str]:
    """The rules of a call's JSON object."""
    alternatives = " | ".join(f"object_{k}" for k in range(len(tools)))
    rules = [f'object[capture="{CALL_CAPTURE}"]: {alternatives}']
    arguments = "parameters" if parser == "llama3_json" else "arguments"
    for k, tool in enumerate(tools):
        rules.append(f"object_{k}: {json_rule(_call_schema(tool, arguments))}")
    return rules


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    parameters = _parameters(tool)
    # References in a tool's schema start at its root, which is no longer one.
    definitions = {name: parameters.pop(name) for name in _DEFINITIONS if name in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments: parameters},
        "required": ["name", arguments],
        **definitions,
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. A function without parameters is called with ``{}``."""
    return {"type": "object", **(tool.parameters or _NO_PARAMETERS)}


def _text_parameters(tool: Tool) -> tuple[str, ...]:
    """The parameters whose values are strings in any case, or of which nothing is known."""
    properties = _parameters(tool).get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    return tuple(name for name, schema in schemas.items() if _is_text(schema))


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and "type" not in schema:
        return all(isinstance(value, str) for value in values)
    is_open = not {"type", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys()
    return schema.get("type") == "string" or is_open
