"""A model's chat template, rendered as transformers would render it."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import structs

from shared.errors import ContextLengthExceeded, InvalidRequest, StartupError
from shared.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from worker.text.content_parts import parts_of, roles_with_parts
from worker.text.written_tools import with_written_tools, written_form

# Errors that a syntactically correct template can raise for messages it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


_NAMED_OUTPUT = "<start_function_response>"
"""Part of FunctionGemma's templates, which name the function of each output."""
_DEVELOPER = "developer"
_PROBE = "ThisIsTheSystemMessage"
_QUESTION = ChatMessage(role="user", content="?")
HARMONY = "<|channel|>analysis<|message|>"
"""Part of templates for models that answer in OpenAI's Harmony format."""
_SERIALIZED_ARGUMENTS = re.compile(r"""arguments['"\]]*\s*\|\s*tojson""")
_CLOCK = "strftime_now"
"""The function with which templates print the time."""
_DIRECTIVE = re.compile(r"%[-_0^#]?[EO]?(.)", re.DOTALL)
_DATE_DIRECTIVES = frozenset("aAbBhdejmyYCgGuUVwWxDFzZnt%")
"""The directives of strftime that print the same during a whole day in UTC."""
_END = "<warren-the-final-message-ends-here> "
"""Without its space, the template has removed the whitespace at the end of the message."""


class ChatTemplate:
    """Converts a conversation into the text that the model was trained to continue."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token``, ...

        Conversations with tools are rendered by ``tool_source``, if the model has such a template.
        Raises `StartupError` if the template has a syntax error.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the model's chat template is invalid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._tool_use = None if tool_source is None else ChatTemplate(tool_source, special_tokens)
        self.source = source
        self.has_tools = "tools" in source
        """Whether tools are described by the template; otherwise they are written into the
        messages."""
        self.written_form = written_form(source)
        """The form of calls that is asked for in the messages."""
        self.is_harmony = HARMONY in source
        """Whether the model answers in OpenAI's Harmony format."""

    def with_written_tools(self) -> "ChatTemplate":
        """The same with tools in the messages, even if the template describes some."""
        template = copy(self)
        template.has_tools = False
        template._tool_use = None
        return template

    @property
    def for_tools(self) -> "ChatTemplate":
        """The template of conversations with tools."""
        return self._tool_use or self

    @cached_property
    def tells_time(self) -> bool:
        """Whether the template may print more of the time than the date."""
        of_tools = self._tool_use is not None and self._tool_use.tells_time
        return of_tools or _tells_time(self.source)

    def render(self, prompt: ChatPrompt, *, max_chars: int | None = None) -> str:
        """The prompt, up to the point where the answer begins or continues. Rendering stops once
        the text has more than ``max_chars``. Raises `InvalidRequest` and `ContextLengthExceeded`.
        """
        if prompt.continue_final_message and prompt.messages[-1].tool_calls:
            raise InvalidRequest("A message with tool calls cannot be continued.", param="messages")
        if self._tool_use is not None and _has_tools(prompt):
            return self._tool_use.render(prompt, max_chars=max_chars)
        if not self.has_tools and _has_tools(prompt):
            prompt = with_written_tools(prompt, self.written_form, takes_system=self._takes_system)
        said = prompt.messages
        if _DEVELOPER not in self.source:
            said = tuple(_without_developers(said))
        if _NAMED_OUTPUT in self.source:
            said = tuple(_with_names(said))
        messages = [self._message(message) for message in said]
        if prompt.continue_final_message:
            _mark_end(messages[-1])
        text = self._render(messages, prompt, max_chars)
        # The arguments of a call may have half of a surrogate pair, escaped as JSON permits.
        text = text.encode(errors="replace").decode()
        return _up_to_end(text) if prompt.continue_final_message else text

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        fields = _fields(message)
        if self.is_harmony and message.tool_calls and message.content and message.reasoning_content:
            # The template refuses both, and shows either as the thought before the call.
            fields["thinking"] += f"\n{fields.pop('content')}"
        elif message.part_chars and message.role in self._roles_with_parts:
            fields["content"] = parts_of(message) or message.content
        if message.tool_calls and not self.has_tools:
            # DeepSeek's templates add tags to any content, and some of them append the arguments
            # to a text.
            fields["content"] = message.content or None
            if not _SERIALIZED_ARGUMENTS.search(self.source):
                for called, call in zip(fields["tool_calls"], message.tool_calls, strict=True):
                    called["function"]["arguments"] = call.arguments
        return fields

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        return roles_with_parts(self._render_probe)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the text of a system message reaches the model: Gemma's templates refuse it."""
        system = ChatMessage(role="system", content=_PROBE)
        try:
            return _PROBE in self._render_probe([_fields(system), _fields(_QUESTION)])
        except InvalidRequest:
            return False

    def _render_probe(self, messages: list[dict[str, Any]]) -> str:
        return self._render(messages, ChatPrompt(messages=(_QUESTION,)))

    def _render(
        self, messages: list[dict[str, Any]], prompt: ChatPrompt, max_chars: int | None = None
    ) -> str:
        variables = {
            **self._special_tokens,
            **prompt.template_kwargs,
            _CLOCK: partial(_strftime, prompt.now),
            "messages": messages,
            "tools": [_tool(tool) for tool in prompt.tools] or None,
            "add_generation_prompt": (
                prompt.add_generation_prompt and not prompt.continue_final_message
            ),
        }
        try:
            return _joined(self._template.generate({"documents": None, **variables}), max_chars)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template rejects these messages: {error}", param="messages"
            ) from error


def _tells_time(source: str) -> bool:
    """See `ChatTemplate.tells_time`. The clock must be called with the text of a format everywhere:
    any other use may print the time."""
    tree = _environment().parse(source)
    num_uses = sum(name.name == _CLOCK for name in tree.find_all(nodes.Name))
    num_dates = sum(map(_is_date, tree.find_all(nodes.Call)))
    num_tests = sum(map(_is_clock, (test.node for test in tree.find_all(nodes.Test))))
    return num_uses > num_dates + num_tests


def _is_clock(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == _CLOCK


def _is_date(call: nodes.Call) -> bool:
    """Whether a call prints a date."""
    match call:
        case nodes.Call(node=nodes.Name(name=name), args=[nodes.Const(value=str(text))]):
            return name == _CLOCK and _DATE_DIRECTIVES.issuperset(_DIRECTIVE.findall(text))
        case _:
            return False


def _without_developers(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """The messages for a template that does not know the role ``developer``, and would leave them
    out: they become system messages. A developer message after a system message continues it,
    because many templates refuse a second system message."""
    last: ChatMessage | None = None
    for message in messages:
        is_developer = message.role == _DEVELOPER
        if is_developer and last is not None and last.role == "system":
            content = f"{last.content}\n\n{message.content}"
            last = structs.replace(last, content=content, part_chars=())
            continue
        if last is not None:
            yield last
        last = structs.replace(message, role="system") if is_developer else message
    if last is not None:
        yield last


def _has_tools(prompt: ChatPrompt) -> bool:
    has_calls = any(one.tool_calls or one.role == "tool" for one in prompt.messages)
    return bool(prompt.tools) or has_calls


def _joined(parts: Iterable[str], max_chars: int | None) -> str:
    """Raises `ContextLengthExceeded`. A template can print megabytes for a few characters."""
    if max_chars is None:
        return "".join(parts)
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        max_chars -= len(part)
        if max_chars < 0:
            raise ContextLengthExceeded("The prompt is too long.", param="messages")
    return "".join(taken)


def _with_names(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """The messages, and in each output the name of its function, which OpenAI's clients do not
    send."""
    names: dict[str, str] = {}
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        name = names.get(message.tool_call_id or "") if message.role == "tool" else None
        is_nameless = name is not None and message.name is None
        yield structs.replace(message, name=name) if is_nameless else message


def _up_to_end(text: str) -> str:
    """The text before the marker at the end of the final message."""
    before, mark, after = text.rpartition(_END.rstrip())
    if not mark:
        raise InvalidRequest(
            "The model's chat template omits the final message, so it cannot be continued.",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()


def _mark_end(message: dict[str, Any]) -> None:
    if isinstance(message["content"], str):
        message["content"] += _END
    else:
        message["content"][-1]["text"] += _END


def _fields(message: ChatMessage) -> dict[str, Any]:
    """A message in the form that transformers' templates expect; absent fields have no key."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
        fields["thinking"] = message.reasoning_content  # its name in some templates
    return fields


def _tool_call(call: ToolCall) -> dict[str, Any]:
    # Templates serialize the arguments to JSON themselves.
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    except RecursionError:
        raise InvalidRequest(
            "messages: the arguments of a tool call are nested too deeply.", param="messages"
        ) from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.parameters}}


class _GenerationTag(Extension):
    """``{% generation %}`` marks answers for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared like this by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(now: float, format: str) -> str:  # noqa: A002 - templates may name the argument
    """A Unix time in UTC, so that all workers print the same date."""
    return datetime.fromtimestamp(now or time.time(), UTC).strftime(format)
