"""Anthropic's messages: what the SDK assembles of a stream is the whole message."""

import json
from itertools import pairwise
from typing import Any

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.rendering import Log, context_of

THOUGHT = "<think>\nWell, no.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é}"], "b": {"c": null}}}\n</tool_call>'
TEXTS = [
    "",
    " Once upon a time. ",
    f"{THOUGHT}No.",
    f"{THOUGHT}{CALL}\n{CALL}",
    f"Let me see.\n{CALL}\nDone.",
    "<think>\nnever said",
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
]


def message_log(**fields: Any) -> Log:
    defaults = {"endpoint": "messages", "request_id": "msg-1"}
    return Log(context_of(**{**defaults, **fields}))


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's SDK puts together."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                kind = event["delta"].pop("type")
                ((name, text),) = event["delta"].items()
                block = message["content"][event["index"]]
                if kind == "input_json_delta":
                    texts[event["index"]] = texts.get(event["index"], "") + text
                    block["input"] = pydantic_core.from_json(
                        texts[event["index"]], allow_partial=True
                    )
                else:
                    block[name] += text
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


@settings(deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    length=st.integers(0, 200),
    cuts=st.lists(st.integers(1, 100), max_size=8, unique=True).map(sorted),
)
def test_what_the_sdk_assembles_is_the_whole_message(
    text: str, length: int, cuts: list[int]
) -> None:
    """For each text, also a text that is cut off, and each division into tokens."""
    ends = [0, *[cut for cut in cuts if cut < len(text[:length])], len(text[:length])]
    tokens = [text[start:end] for start, end in pairwise(ends)]
    log = message_log(tool_parser="hermes", reasoning_parser="qwen3")
    log.say(*tokens[:-1]).finish(tokens[-1], "stop" if length >= len(text) else "length")

    message = assembled(log.chunks())

    assert message == log.whole()


def test_events_come_in_anthropics_order() -> None:
    log = message_log(tool_parser="hermes", reasoning_parser="qwen3")
    log.say(*f"{THOUGHT}See.{CALL}").finish()

    kinds = [json.loads(data)["type"] for _, data in log.payloads()]

    assert [event for event, _ in log.payloads()] == kinds
    told = [kind for k, kind in enumerate(kinds) if kind != kinds[k - 1]]
    assert told == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]


def test_blocks_are_thinking_text_and_calls() -> None:
    log = message_log(tool_parser="hermes", reasoning_parser="qwen3")
    content = log.say(f"{THOUGHT}See.{CALL}").finish().whole()["content"]

    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert (content[0]["thinking"], content[1]["text"]) == ("Well, no.", "See.")
    assert content[0]["signature"]
    assert (content[2]["name"], content[2]["input"]) == ("f", {"a": [1, "é}"], "b": {"c": None}})
    assert content[2]["id"].startswith("toolu_")


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("Yes.", "stop", None, ("end_turn", None)),
        ("Yes.", "stop", 7, ("end_turn", None)),
        ("Yes.", "stop", "END", ("stop_sequence", "END")),
        ("Yes.", "length", None, ("max_tokens", None)),
        (CALL, "stop", None, ("tool_use", None)),
        (CALL[:60], "length", None, ("max_tokens", None)),
    ],
)
def test_a_message_says_why_it_ended(
    text: str, reason: Any, stop: str | int | None, expected: tuple[str, str | None]
) -> None:
    log = message_log(tool_parser="hermes").say(text).finish("", reason, stop_reason=stop)

    for message in (log.whole(), assembled(log.chunks())):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_message_that_the_context_has_ended_says_so() -> None:
    log = message_log(max_tokens=9).say("Yes").finish("", "length")

    for message in (log.whole(), assembled(log.chunks())):
        assert message["stop_reason"] == "model_context_window_exceeded"


def test_cached_tokens_are_counted_apart() -> None:
    log = message_log().say("Yes").finish(".", num_cached_tokens=2)

    for message in (log.whole(), assembled(log.chunks())):
        assert message["usage"] == {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
        }


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        ('{"a": "b', {}),
        ('{"a": 1, "b', {"a": 1}),
    ],
)
def test_an_input_is_always_an_object(arguments: str, value: Any) -> None:
    log = message_log(tool_parser="hermes")
    log.say('<tool_call>{"name": "f", "arguments": ' + arguments).finish("", "length")

    assert log.whole()["content"][0]["input"] == value


def test_a_failure_is_an_error_event() -> None:
    log = message_log().say("Once").fail("worker_lost")

    assert log.payloads()[-1][0] == "error"
    assert log.chunks()[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "Sorry."},
        "request_id": "msg-1",
    }
