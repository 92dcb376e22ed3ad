"""The tools that a chat may call: validation, and what the job and the reader of its log need."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct, structs

from gateway.api.bodies.call_grammars import calls, text_with_calls
from gateway.api.bodies.conversations import (
    CALLABLE,
    FunctionDefinition,
    OfferedTools,
    offered_tools,
)
from gateway.api.bodies.grammars import after_thought, text_rules
from gateway.api.bodies.parsing import refused
from gateway.api.bodies.structured_output import RequestedConstraint, json_constraint
from gateway.tool_formats import TOOL_FORMATS
from gateway.tool_formats.arguments import parameters, text_parameters
from gateway.tool_formats.rules import GrammarTooLong
from gateway.tool_formats.tool_format import ToolFormat
from shared.errors import InvalidRequest, Unavailable
from shared.messages import MAX_GRAMMAR_CHARS, MAX_TOOLS, Announcement, Constraint, Tool

_DEFAULT_PARSER = "hermes"

Functions: TypeAlias = Annotated[tuple[FunctionDefinition, ...], Meta(max_length=MAX_TOOLS)]
FunctionCallMode: TypeAlias = Literal["none", "auto"]


class FunctionChoice(Struct, frozen=True):
    name: str


class ChatFunctionChoice(Struct, frozen=True, tag="function"):
    """The function that must be called."""

    function: FunctionChoice


class ChatCustomChoice(Struct, frozen=True, tag="custom"):
    """The custom tool that must be called."""

    custom: FunctionChoice


class AllowedTool(Struct, frozen=True, kw_only=True):
    """Tools that are neither functions nor custom tools are left out."""

    type: str
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None

    @property
    def chosen(self) -> FunctionChoice | None:
        return self.custom if self.type == "custom" else self.function


class AllowedFunctions(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[AllowedTool, ...], Meta(max_length=MAX_TOOLS)]


class ChatAllowedTools(Struct, frozen=True, tag="allowed_tools"):
    """The functions that may be called; the prompt has the others, too, so that its prefix stays
    the same."""

    allowed_tools: AllowedFunctions

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools. Raises `InvalidRequest`."""
        chosen = [tool.chosen for tool in self.allowed_tools.tools if tool.type in CALLABLE]
        if None in chosen:
            raise refused("tool_choice", "expected the name of each function.")
        return frozenset(tool.name for tool in chosen if tool is not None)


ToolMode: TypeAlias = Literal["none", "auto", "required"]
ChatToolChoice: TypeAlias = ToolMode | ChatFunctionChoice | ChatCustomChoice | ChatAllowedTools


class ToolUse(NamedTuple):
    """The tools that a request may call."""

    tools: tuple[Tool, ...]
    parser: str
    is_single: bool
    is_required: bool
    """Whether the model has to call."""
    callable: Mapping[str, Tool]
    """The tools that the model may call, by the path of their schemas in the body."""
    custom: tuple[str, ...] = ()
    """The names of the custom tools."""

    @property
    def form(self) -> ToolFormat:
        """The format in which the model writes calls."""
        return TOOL_FORMATS[self.parser]

    def text_parameters(self) -> dict[str, tuple[str, ...]] | None:
        """The text parameters of each callable tool, by its name; None if the parser does not need
        them."""
        if not self.form.has_text_parameters:
            return None
        return {tool.name: text_parameters(tool) for tool in self.callable.values()}

    def with_any_arguments(self, path: str) -> "ToolUse":
        """The same with any object as the arguments of the tool whose schema is at ``path``."""
        tool = structs.replace(self.callable[path], parameters={"type": "object"})
        return self._replace(callable={**self.callable, path: tool})

    def schemas(self) -> tuple[RequestedConstraint, ...]:
        """The constraints that the arguments of the callable tools have to match. Raises
        `InvalidRequest`."""
        return tuple(_schema(tool, path) for path, tool in self.callable.items())

    def constraint(
        self, reasoning_parser: str | None, answer: Constraint | None = None
    ) -> Constraint:
        """Calls, or an ``answer`` if the request allows it, after a thought if there is any. Raises
        `InvalidRequest`."""
        too_long = refused("tools", f"longer than {MAX_GRAMMAR_CHARS} characters together.")
        try:
            rules = calls(
                self.form,
                self.callable.values(),
                is_single=self.is_single,
                is_required=answer is None,
            )
        except GrammarTooLong:
            raise too_long from None
        if answer is None:
            rules = {"answer": "calls", **rules}
        else:
            rules = {"answer": "calls | said", **text_rules(answer, reasoning_parser), **rules}
        constraint = after_thought(rules, reasoning_parser)
        if len(constraint.source) > MAX_GRAMMAR_CHARS:
            raise too_long
        return constraint

    def constraint_after_tag(self, reasoning_parser: str | None) -> Constraint | None:
        """Any text in which a call of these tools follows the opening tag of a call. None if calls
        have no such tag, or the tools are too long."""
        tools = self.callable.values()
        try:
            constraint = text_with_calls(
                self.form, tools, reasoning_parser, is_single=self.is_single
            )
        except GrammarTooLong:
            return None
        if constraint is None or len(constraint.source) > MAX_GRAMMAR_CHARS:
            return None
        return constraint


def tool_use(
    offered: OfferedTools,
    choice: ChatToolChoice | None,
    *,
    is_parallel: bool,
    served: Announcement | None,
) -> ToolUse | None:
    """None: nothing may be called.

    Raises `InvalidRequest`, and `Unavailable` if no worker was heard yet, because only workers know
    the format in which their model writes calls.
    """
    chosen = callable_tools(choice, offered)
    if not chosen:
        return None
    if served is None:
        raise Unavailable("No worker of this model has said yet how it calls tools.")
    is_one = isinstance(choice, ChatFunctionChoice | ChatCustomChoice)
    is_required = is_one or _mode(choice) == "required"
    parser = served.tool_parser
    if parser is None or parser not in TOOL_FORMATS:
        if not is_required:
            raise refused("tools", f"the model '{served.model}' does not support tool calls.")
        parser = _DEFAULT_PARSER
    return ToolUse(
        offered.functions,
        parser,
        is_single=is_one or not is_parallel,
        is_required=is_required,
        callable=chosen,
        custom=tuple(tool.name for tool in chosen.values() if tool.name in offered.custom),
    )


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


def callable_tools(choice: ChatToolChoice | None, offered: OfferedTools) -> Mapping[str, Tool]:
    """The tools that may be called, by the path of their schemas. Raises `InvalidRequest`."""
    tools = dict(zip(offered.paths, offered.functions, strict=True))
    names = _names(choice)
    if names is not None:
        tools = {path: tool for path, tool in tools.items() if tool.name in names}
        if names - {tool.name for tool in tools.values()}:
            raise refused("tool_choice", "no such tool.")
    if _mode(choice) == "required":
        for path, kind in offered.others.items() if names is None else ():
            raise refused(path, f"'{kind[:64]}' is not supported.")
        if not tools:
            raise refused("tool_choice", "there are no tools.")
    return {} if choice == "none" else tools


def _names(choice: ChatToolChoice | None) -> frozenset[str] | None:
    """The tools that are chosen by name, if they are."""
    match choice:
        case ChatFunctionChoice(tool) | ChatCustomChoice(tool):
            return frozenset({tool.name})
        case ChatAllowedTools():
            return choice.names
        case _:
            return None


def _mode(choice: ChatToolChoice | None) -> object:
    return choice.allowed_tools.mode if isinstance(choice, ChatAllowedTools) else choice


def _schema(tool: Tool, param: str) -> RequestedConstraint:
    return RequestedConstraint(param, json_constraint(parameters(tool), param))
