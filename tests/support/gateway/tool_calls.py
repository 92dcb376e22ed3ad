"""Tools, the calls of each family, and what a request makes of tools."""

from typing import Any

import msgspec

from gateway.api.bodies.parsing import parse
from gateway.api.bodies.schemas import ChatRequest
from gateway.api.bodies.tool_choice import ToolUse
from shared.messages import Announcement

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
FORMS = {
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "\n",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        "<start_function_call>call:get_time{}<end_function_call>",
        "",
        ("", ""),
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
        "<|tool_call>call:get_time{}<tool_call|>",
        "",
        ("", ""),
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "<tool_call>get_time\n</tool_call>",
        "\n",
        ("", ""),
    ),
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome"}',
        "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
        "<|call|><|start|>assistant",
        ("", ""),
    ),
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "\n",
        ("", ""),
    ),
    "kimi_k2": (
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|>',
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        '{"name": "get_time", "parameters": {}}',
        "; ",
        ("", ""),
    ),
    "mistral": (
        '{"name": "get_weather", "arguments": {"city": "Rome"}}',
        '{"name": "get_time", "arguments": {}}',
        ", ",
        ("[", "]"),
    ),
    "pythonic": ('get_weather(city="Rome")', "get_time()", ", ", ("[", "]")),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "\n",
        ("", ""),
    ),
}
"""Two calls, what stands between them, and around all."""


def use_of(
    tools: Any,
    choice: Any = None,
    *,
    parser: str | None = "hermes",
    is_parallel: bool = True,
) -> ToolUse | None:
    served = Announcement(
        worker="w",
        model="m",
        vocab_size=100,
        max_seq_len=100,
        fingerprint="f",
        max_num_seqs=1,
        tool_parser=parser,
    )
    return chat(tools, tool_choice=choice, parallel_tool_calls=is_parallel).tool_use(served)


def chat(tools: Any, **more: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    return parse(ChatRequest, msgspec.json.encode({**body, **more}))
