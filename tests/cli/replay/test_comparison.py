"""Where two answers part, whatever their endpoint."""

from collections.abc import Mapping
from typing import Any

import pytest

from cli.replay.comparison import Parting, parting
from cli.replay.kinds import KINDS

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def word(text: bytes, logprob: float = -0.5, **others: float) -> dict[str, Any]:
    """A token with its logprobs, as in a chat; ``others`` are the likeliest other tokens."""
    likeliest = {text.decode(errors="replace"): logprob, **others}
    return {
        "token": text.decode(errors="replace"),
        "logprob": logprob,
        "bytes": [*text],
        "top_logprobs": [{"token": name, "logprob": value} for name, value in likeliest.items()],
    }


def chat(content: str | None, *words: dict[str, Any], **message: Any) -> dict[str, Any]:
    logprobs = {"content": [*words]} if words else None
    choice = {"message": {"content": content, **message}, "logprobs": logprobs}
    return {"choices": [{**choice, "finish_reason": "stop"}]}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def response(text: str, *calls: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    return {"output": [said, *calls], "status": status}


def parted(endpoint: str, stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> Parting | None:
    read = KINDS[endpoint].read
    return parting(read(stored), read(replayed))


def test_the_ids_of_calls_do_not_count() -> None:
    stored, replayed = (chat(None, tool_calls=[call(name)]) for name in ("call_1", "call_2"))

    assert parted(CHATS, stored, replayed) is None


def test_other_arguments_of_a_call_are_found() -> None:
    stored, replayed = (chat(None, tool_calls=[call("1", f'{{"a":{k}}}')]) for k in range(2))

    found = parted(CHATS, stored, replayed)

    assert found is not None
    assert (found.part, found.token, found.margin) == ("calls", None, None)


def test_a_call_of_a_response_is_compared_with_its_input() -> None:
    calls = ({"type": "custom_tool_call", "name": "f", "input": text} for text in ("a", "b"))
    stored, replayed = (response("x", one) for one in calls)

    found = parted(RESPONSES, stored, replayed)

    assert found is not None
    assert found.part == "calls"


def test_reasoning_is_compared_before_the_text() -> None:
    found = parted(
        CHATS, chat("a", reasoning_content="no"), chat("b", reasoning_content="not at all")
    )

    assert found is not None
    assert (found.part, found.char, found.replayed) == ("reasoning", 2, "t at all")


def test_an_answer_that_ended_for_another_reason_is_not_equal() -> None:
    found = parted(RESPONSES, response("a"), response("a", status="incomplete"))

    assert found is not None
    assert (found.part, found.stored, found.replayed) == ("ending", "completed", "incomplete")


def test_a_new_answer_that_ends_early_parts_after_its_last_token() -> None:
    found = parted(CHATS, chat("one two"), chat("one", word(b"on"), word(b"e")))

    assert found is not None
    assert (found.char, found.token, found.margin) == (3, 2, None)


def test_the_tokens_may_differ_before_the_first_character_does() -> None:
    new = chat("a capital", word(b"a"), word(b" capital", -0.25, **{" cap": -1.0, " c": -3.0}))

    found = parted(CHATS, chat("a capped"), new)

    assert found is not None
    assert (found.char, found.token, found.margin) == (5, 1, 0.75)


def test_a_text_after_reasoning_is_found_among_the_tokens() -> None:
    words = (word(b"hm"), word(b"</think>"), word(b"yes", -0.5, no=-1.0))

    found = parted(
        CHATS, chat("no", reasoning_content="hm"), chat("yes", *words, reasoning_content="hm")
    )

    assert found is not None
    assert (found.char, found.token, found.margin) == (0, 2, 0.5)


def test_parts_of_a_character_have_no_margin() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]

    found = parted(CHATS, chat("aè"), chat("aé", word(b"a"), word(first), word(second)))

    assert found is not None
    assert (found.char, found.token, found.margin) == (1, 1, None)


@pytest.mark.parametrize("alternatives", [{"ab": -0.5, "ac": -2.0}, {"ab": -0.5, "ad": -2.0}])
def test_the_tokens_of_completions_have_offsets(alternatives: dict[str, float]) -> None:
    logprobs = {
        "text_offset": [0, 1],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, alternatives],
    }
    ending = {"finish_reason": "stop"}
    stored = {"choices": [{"text": "xac", "logprobs": None, **ending}]}

    found = parted(
        COMPLETIONS, stored, {"choices": [{"text": "xab", "logprobs": logprobs, **ending}]}
    )

    assert found is not None
    assert (found.char, found.token, found.margin) == (2, 1, 1.5)
    assert found.is_at_least == ("ac" not in alternatives)


def test_answers_with_other_numbers_of_choices_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        parted(CHATS, chat("a"), {"choices": []})
