"""The parts of a message's content, for chat templates that join them in their own way."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.messages import ChatMessage

_TEXTS = ("FirstPart", "SecondPart")
_DUMPED_LIST = re.compile(rf"text\W{{2,20}}{_TEXTS[0]}")
"""A list of parts that a template has written out as it is."""
_ASKED = {"role": "user", "content": "?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_PROBES: Mapping[str, Sequence[dict[str, Any]]] = {
    "system": [{"role": "system"}, _ASKED],
    "developer": [{"role": "developer"}, _ASKED],
    "user": [{"role": "user"}],
    "assistant": [_ASKED, {"role": "assistant"}, _ASKED],
    "tool": [_ASKED, _CALLED, {"role": "tool", "tool_call_id": "call00001"}],
}
"""For each role a conversation in which the content of its message is missing."""


def parts_of(message: ChatMessage) -> list[dict[str, Any]]:
    """The parts, as templates expect them; empty if the content is one text or has been changed."""
    texts: list[str] = []
    start = 0
    for num_chars in message.part_chars:
        texts.append(message.content[start : start + num_chars])
        start += num_chars + 1
    return _parts(texts) if "\n".join(texts) == message.content else []


def roles_with_parts(render: Callable[[list[dict[str, Any]]], str]) -> frozenset[str]:
    """The roles whose messages may have a list of parts as their content. ``render`` applies the
    template to messages; it may raise `InvalidRequest`."""
    return frozenset(role for role, probe in _PROBES.items() if _takes_parts(render, probe))


def _takes_parts(
    render: Callable[[list[dict[str, Any]]], str], probe: Sequence[dict[str, Any]]
) -> bool:
    try:
        text = render([{"content": _parts(_TEXTS), **message} for message in probe])
    except InvalidRequest:
        return False
    return all(part in text for part in _TEXTS) and not _DUMPED_LIST.search(text)


def _parts(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]
