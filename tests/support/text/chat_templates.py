"""Conversations as clients send them, rendered by Warren and by transformers."""

import copy
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gateway.api.bodies.conversations import chat_tools
from gateway.api.bodies.parsing import parse
from gateway.api.bodies.schemas import ChatRequest
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt
from worker.text.chat_template import ChatTemplate

Body: TypeAlias = Mapping[str, Any]
Verdict: TypeAlias = Literal["equal", "both refuse", "different", "incomparable"]

DIRECTORY = Path.home() / ".cache" / "warren" / "chat_templates"
"""Where ``python -m tests.system.chat_templates`` leaves public templates."""

_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_TOKENIZER: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
    tokenizer_object=Tokenizer(models.BPE()), **_SPECIAL_TOKENS
)
_DUMPED_LIST = re.compile(r"type\W{2,20}text\W")


def _user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def _system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _answer(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _result(content: Any, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


_CITY = {"type": "string", "description": 'A city, such as <Köln> & "Rome"'}
_TOOLS = [
    _tool("weather", "Of a city", city=_CITY, days={"type": "integer", "minimum": 1}),
    _tool("now", "The time", zones={"type": "array", "items": {"enum": ["UTC", "CET"]}}),
    _tool("reset", "Nothing is left"),
]
_WEATHER = _call("call00001", "weather", '{"city": "Köln", "days": 2}')
_NOW = _call("call00002", "now", '{"zones": ["UTC"], "exact": true, "of": {"a": null}}')
_ASKED = _user("How is the weather?")
_THOUGHT = {"reasoning_content": "They want\nthe weather."}

CONVERSATIONS: Mapping[str, Body] = {
    "a question": {"messages": [_user("What is 2 + 2?")]},
    "an empty question": {"messages": [_user("")]},
    "a system message": {"messages": [_system(" Be brief, <é> & 'so'. "), _user("Hi 🙂\n")]},
    "two system messages": {"messages": [_system("Be brief."), _system("Be kind."), _user("Hi")]},
    "turns": {"messages": [_user("one"), _answer("two\n"), _user(" three")]},
    "turns after a system message": {
        "messages": [_system("Count."), _user("1"), _answer("2"), _user("3"), _answer("4"), _ASKED]
    },
    "two questions": {"messages": [_user("one"), _user("two")]},
    "an answer first": {"messages": [_answer("Hello."), _user("Hi")]},
    "a name": {"messages": [_user("Hi", name="ada")]},
    "no generation prompt": {"messages": [_user("Hi")], "add_generation_prompt": False},
    "a final answer": {"messages": [_user("1"), _answer("2")], "add_generation_prompt": False},
    "a begun answer": {"messages": [_user("1"), _answer("2,")], "continue_final_message": True},
    "a begun answer with spaces": {
        "messages": [_user("1"), _answer("  2, \n")],
        "continue_final_message": True,
    },
    "tools": {"messages": [_ASKED], "tools": _TOOLS},
    "tools after a system message": {"messages": [_system("Be brief."), _ASKED], "tools": _TOOLS},
    "a call": {
        "messages": [_ASKED, _answer(None, tool_calls=[_WEATHER]), _result("sunny")],
        "tools": _TOOLS,
    },
    "a call after a text": {
        "messages": [
            _ASKED,
            _answer("Let me see.", tool_calls=[_WEATHER]),
            _result('{"sky": "blue"}'),
        ],
        "tools": _TOOLS,
    },
    "a call without tools": {
        "messages": [_ASKED, _answer("", tool_calls=[_WEATHER]), _result("sunny")]
    },
    "two calls": {
        "messages": [
            _system("Be brief."),
            _ASKED,
            _answer("", tool_calls=[_WEATHER, _NOW]),
            _result("sunny"),
            _result("noon", "call00002"),
            _answer("It is sunny."),
            _user("Thanks"),
        ],
        "tools": _TOOLS,
    },
    "calls in turns": {
        "messages": [
            _ASKED,
            _answer("", tool_calls=[_WEATHER]),
            _result("sunny"),
            _answer("", tool_calls=[_NOW]),
            _result("noon", "call00002"),
        ],
        "tools": _TOOLS,
    },
    "reasoning": {"messages": [_ASKED, _answer("Sunny.", **_THOUGHT), _user("And now?")]},
    "reasoning before a call": {
        "messages": [_ASKED, _answer("", tool_calls=[_WEATHER], **_THOUGHT), _result("sunny")],
        "tools": _TOOLS,
    },
    "reasoning in the text": {
        "messages": [_ASKED, _answer("<think>\nHm.\n</think>\n\nSunny."), _user("And now?")]
    },
    "thinking": {"messages": [_ASKED], "chat_template_kwargs": {"enable_thinking": True}},
    "no thinking": {"messages": [_ASKED], "chat_template_kwargs": {"enable_thinking": False}},
    "no thinking with tools": {
        "messages": [_ASKED],
        "tools": _TOOLS,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "effort": {"messages": [_ASKED], "reasoning_effort": "high"},
    "a part": {"messages": [_user(_parts("one"))]},
    "parts": {"messages": [_user(_parts("one ", "two", "\nthree"))]},
    "parts of a system message": {"messages": [_system(_parts("one", "two ")), _user("Hi")]},
    "parts of an answer": {"messages": [_user("Hi"), _answer(_parts("one", "two")), _user("?")]},
    "parts of a begun answer": {
        "messages": [_user("Hi"), _answer(_parts("one", "two"))],
        "continue_final_message": True,
    },
    "parts of a result": {
        "messages": [_ASKED, _answer("", tool_calls=[_WEATHER]), _result(_parts("one", "two"))],
        "tools": _TOOLS,
    },
}
"""Bodies of ``POST /v1/chat/completions`` by what is special about them."""


def cached_templates(directory: Path = DIRECTORY) -> dict[str, str]:
    """The sources of the templates that have been downloaded, by their names."""
    return {path.stem: path.read_text() for path in sorted(directory.glob("*.jinja"))}


def verdict(source: str, body: Body) -> Verdict:
    """How the template ``source`` renders a conversation through Warren and through transformers.

    They are not comparable if the template has no tools, which Warren then writes itself, or no
    list of parts, which Warren then joins.
    """
    has_calls = "tools" in body or any("tool_calls" in message for message in body["messages"])
    if has_calls and not _template(source).has_tools:
        return "incomparable"
    theirs = rendered_by_transformers(source, body)
    lists = [text for text in map(_texts, body["messages"]) if text]
    if lists and (theirs is None or not _has_parts(theirs, lists)):
        return "incomparable"
    ours = rendered_by_warren(source, body)
    if ours is None and theirs is None:
        return "both refuse"
    return "equal" if ours == theirs else "different"


def rendered_by_warren(source: str, body: Body) -> str | None:
    """The prompt of a request's job; None if it is refused."""
    request = parse(ChatRequest, json.dumps({"model": "m", **body}).encode())
    (prompt,) = request.prompts(chat_tools(request.tools).functions)
    assert isinstance(prompt, ChatPrompt)
    try:
        return _template(source).render(prompt)
    except InvalidRequest:
        return None


def rendered_by_transformers(source: str, body: Body) -> str | None:
    """The prompt; None if there is none. Arguments are objects there, and each message has a
    content."""
    messages = copy.deepcopy(body["messages"])
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    is_begun = body.get("continue_final_message", False)
    options = {**body.get("chat_template_kwargs", {}), "continue_final_message": is_begun}
    if "reasoning_effort" in body:
        options["reasoning_effort"] = body["reasoning_effort"]
    try:
        text: str = _TOKENIZER.apply_chat_template(
            messages,
            tools=body.get("tools"),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", not is_begun),
            **options,
        )
    except Exception:  # noqa: BLE001 - whatever a template may raise
        return None
    return text


@cache
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, _SPECIAL_TOKENS)


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [part["text"].strip() for part in content] if isinstance(content, list) else []


def _has_parts(text: str, lists: list[list[str]]) -> bool:
    """Whether the texts were rendered, and not the lists as such."""
    return all(part in text for parts in lists for part in parts) and not _DUMPED_LIST.search(text)
