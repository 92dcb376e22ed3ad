"""Tools for models whose chat template has none: written into the messages, in Hermes' form.

Some templates of DeepSeek have calls and their results, but no tools. For these only the tools are
written, with an example of a call in the template's form.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from shared.messages import ChatMessage, ChatPrompt, Tool, ToolCall

DEEPSEEK = "<｜tool▁call▁begin｜>"
"""Part of templates of DeepSeek V3 and R1, and of the models that were distilled from R1."""
_CODE_BLOCK = "```json"
"""Around the arguments of a call, in the templates before V3.1."""
_TOOLS = """\
You may call functions to answer the user. Their signatures are given within <tools></tools>:
<tools>
{tools}
</tools>

{form}"""


class WrittenForm(NamedTuple):
    """The form of calls that a model is asked for."""

    parser: str
    """The name of a format of tool calls."""
    instructions: str


HERMES = WrittenForm(
    "hermes",
    """\
For each call, return a JSON object with the function's name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{"name": "function name", "arguments": {"argument": "value"}}
</tool_call>""",
)


def _deepseek(call: str) -> WrittenForm:
    return WrittenForm(
        "deepseek_v3",
        f"""\
Write calls in exactly this form, one or more of them between the outer tags:
<｜tool▁calls▁begin｜>{DEEPSEEK}{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    )


_DEEPSEEK_R1 = _deepseek('function<｜tool▁sep｜>function name\n```json\n{"argument": "value"}\n```')
_DEEPSEEK_V31 = _deepseek('function name<｜tool▁sep｜>{"argument": "value"}')


def written_form(template: str) -> WrittenForm:
    """The form of calls for a template without tools."""
    if DEEPSEEK not in template:
        return HERMES
    return _DEEPSEEK_R1 if _CODE_BLOCK in template else _DEEPSEEK_V31


def with_written_tools(
    prompt: ChatPrompt, form: WrittenForm = HERMES, *, takes_system: bool = True
) -> ChatPrompt:
    """The prompt with its tools as text of the system message, or of the user's first message if
    the template takes no system message. In Hermes' form, calls and their results become text of
    assistant and user, too; other templates have them."""
    messages = list(_messages(prompt.messages) if form is HERMES else prompt.messages)
    if prompt.tools:
        tools = "\n".join(map(_tool, prompt.tools))
        written = _TOOLS.format(tools=tools, form=form.instructions)
        first = messages[0]
        if first.role == "system":
            messages[0] = structs.replace(first, content=f"{first.content}\n\n{written}".strip())
        elif first.role == "user" and not takes_system:
            messages[0] = structs.replace(first, content=f"{written}\n\n{first.content}")
        else:
            messages.insert(0, ChatMessage(role="system", content=written))
    return structs.replace(prompt, messages=tuple(messages), tools=())


def _messages(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """The results of several calls become one message: some templates want the user and the
    assistant to alternate."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        parts = [message.content, *map(_call, message.tool_calls)]
        content = "\n".join(filter(None, parts)) if message.tool_calls else message.content
        yield structs.replace(message, content=content, tool_calls=())
    if results:
        yield ChatMessage(role="user", content="\n".join(results))


def _tool(tool: Tool) -> str:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    function = {name: value for name, value in described.items() if value is not None}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _call(call: ToolCall) -> str:
    # The arguments are JSON already, unless a client sent something else as a model's.
    return (
        f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
        f'"arguments": {call.arguments}}}\n</tool_call>'
    )
