"""Bodies that are read although they are unusual, and the errors about unreadable bodies."""

import json
from typing import Any

import pytest

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.parsing import Body, parse
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from shared.errors import InvalidRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 9}
RESPONSE = {"model": "m", "input": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def encoded(base: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**base, **more}).encode()


def refusal(kind: type[Body], body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        parse(kind, body)
    return refused.value


def test_integral_floats_are_integers() -> None:
    chat = parse(
        ChatRequest,
        encoded(CHAT, max_tokens=5.0, seed=1.0, n=2e0, stop_token_ids=[1.0, 2, 3.0]),
    )

    assert (chat.max_tokens, chat.seed, chat.n) == (5, 1, 2)
    assert chat.stop_token_ids == (1, 2, 3)
    assert all(type(token) is int for token in chat.stop_token_ids)


def test_integral_floats_within_lists_are_integers() -> None:
    body = {"model": "m", "prompt": [[1.0, 2.0], [3]]}

    assert parse(CompletionRequest, encoded(body)).prompt == [[1, 2], [3]]


@pytest.mark.parametrize("value", [5.5, 1e400, -0.5])
def test_other_floats_are_no_integers(value: float) -> None:
    body = encoded(CHAT, max_tokens=value).replace(b"Infinity", b"1e400")

    assert refusal(ChatRequest, body).param in ("max_tokens", None)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (
            ChatRequest,
            encoded(CHAT, tools=[FUNCTION], tool_choice={"type": "function", "name": "f"}),
            "tool_choice.function",
        ),
        (ChatRequest, encoded(CHAT, functions=[{"parameters": {"a": 1}}]), "functions[0].name"),
        (MessagesRequest, encoded(MESSAGE, thinking={"budget_tokens": 1024}), "thinking.type"),
        (MessagesRequest, encoded(MESSAGE, system=[{"type": "text"}]), "system[0].text"),
        (MessagesRequest, encoded(MESSAGE, tool_choice={"name": "f"}), "tool_choice.type"),
        (
            MessagesRequest,
            encoded(MESSAGE, output_config={"format": {"schema": {"a": 1}}}),
            "output_config.format.type",
        ),
        (ResponsesRequest, encoded(RESPONSE, conversation={"foo": 1}), "conversation.id"),
        (ChatRequest, b'{"model": "m"}', "messages"),
    ],
)
def test_a_missing_field_is_named_with_its_path(kind: type[Body], body: bytes, param: str) -> None:
    error = refusal(kind, body)

    assert error.param == param
    assert error.message == f"{param}: required, but missing"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(rb"cut \ud83d", id="at the end"),
        pytest.param(rb"cut \ud83d and more text behind it", id="before text"),
        pytest.param(rb"a \\ud83d, a whole \ud83d\ude00 and half \ude00", id="second half"),
    ],
)
def test_half_an_emoji_is_named(text: bytes) -> None:
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % text

    message = refusal(ChatRequest, body).message

    half = body.rfind(b"\\")
    assert f"{body[half : half + 6].decode()} at byte {half} is half of a surrogate pair" in message


def test_a_body_that_is_cut_is_named_as_such() -> None:
    assert "truncated" in refusal(ChatRequest, encoded(CHAT)[:-5]).message
