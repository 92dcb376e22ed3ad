"""Tools for models whose chat template has none: written into the messages, in Hermes' form."""

import json
from collections.abc import Iterator, Sequence

from msgspec import structs

from shared.messages import ChatMessage, ChatPrompt, Tool, ToolCall

_INSTRUCTIONS = """\
You may call functions to answer the user. Their signatures are given within <tools></tools>:
<tools>
{tools}
</tools>

For each call, return a JSON object with the function's name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_written_tools(prompt: ChatPrompt) -> ChatPrompt:
    """The prompt with its tools, calls and their results as text of system, assistant and user."""
    messages = list(_messages(prompt.messages))
    if prompt.tools:
        written = _INSTRUCTIONS.format(tools="\n".join(map(_tool, prompt.tools)))
        first = messages[0]
        if first.role == "system":
            messages[0] = structs.replace(first, content=f"{first.content}\n\n{written}".strip())
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
