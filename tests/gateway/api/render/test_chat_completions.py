"""How a chat's log is worded, streamed and whole."""

import json
import random
from typing import Any

import pytest

from gateway.api.render.formats import Endpoint
from gateway.api.render.logprobs import chat_logprobs
from shared.messages import Logprob, TokenLogprobs
from tests.support.gateway.rendering import END, Log, context_of, joined

CALLS = (
    'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def calls_of(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls, as the official client puts them together."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                assert set(delta) == {"index", "id", "type", "function"}
                assert delta["function"]["arguments"] == ""
                calls.append({**delta, "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return [{k: v for k, v in call.items() if k != "index"} for call in calls]


def test_each_choice_has_its_own_role_and_end() -> None:
    """The chunks of several choices interleave."""
    log = Log(context_of(num_choices=2)).say("x").say("y", choice=1).say("z")
    chunks = log.finish("!", choice=1).finish("?", "length").chunks()

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["index"] for c in choices if "role" in c["delta"]] == [0, 1]
    ends = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
    assert ends == [(1, "stop"), (0, "length")]
    assert joined(chunks, "content") == "xz?"
    assert joined(chunks, "content", 1) == "y!"


def test_a_stop_string_within_a_call_does_not_finish_it() -> None:
    log = Log(context_of(tool_parser="hermes", is_forced=True))
    log.say('<tool_call>\n{"name": "f", "arguments": {"city": "').finish(stop_reason="Rome")

    (whole,) = log.whole()["choices"]
    (last,) = log.chunks()[-1]["choices"]

    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    for choice in (whole, last):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Rome")


def test_the_chunk_that_ends_a_choice_has_no_text() -> None:
    """Text beside a finish reason confuses some clients."""
    *_, last = Log(context_of()).say("a").finish("b", "length").chunks()

    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"


def test_all_choices_are_there_when_the_answer_is_whole() -> None:
    log = Log(context_of(num_choices=2)).say("x").finish("1").say("y", choice=1)

    choices = log.finish("2", choice=1).whole()["choices"]

    assert [(c["index"], c["message"]["content"]) for c in choices] == [(0, "x1"), (1, "y2")]


def test_logprobs_stand_beside_each_token() -> None:
    """A list of tokens, unlike the parallel lists of completions."""
    rendering = context_of(logprobs=2)
    log = Log(rendering).say("é", " b").finish("!")

    (whole,) = log.whole()["choices"]
    streamed = [
        entry
        for chunk in log.chunks()
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]

    assert whole["logprobs"]["refusal"] is None
    assert whole["logprobs"]["content"] == streamed
    assert streamed[0] == {
        "token": "é",
        "logprob": -2.0,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "best", "logprob": -1.0, "bytes": [98, 101, 115, 116]},
            {"token": "é", "logprob": -2.0, "bytes": [0xC3, 0xA9]},
        ],
    }
    assert [entry["token"] for entry in streamed] == ["é", " b", "!"]


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_an_end_token_that_is_not_text_has_no_logprobs_but_counts(endpoint: Endpoint) -> None:
    log = Log(context_of(endpoint=endpoint, logprobs=0, include_usage=True))
    log.say("Once", " upon").finish(END)

    told = json.dumps([log.chunks(), log.whole()])

    assert told.count(" upon") > 1
    assert END not in told
    assert log.whole()["usage"]["total_tokens"] == 3 + 3


def test_tokens_as_ids_include_the_end_token() -> None:
    log = Log(context_of(logprobs=0, tokens_as_ids=True)).say("é").finish(END)

    (choice,) = log.whole()["choices"]

    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == ["token_id:2", "token_id:10"]
    assert [c["choices"][0]["logprobs"]["content"] for c in log.chunks()[1:-1]] == [
        content[:1],
        content[1:],
    ]


def test_tokens_without_text_keep_their_logprobs() -> None:
    chunks = Log(context_of(logprobs=0)).say("").finish("é").chunks()

    told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [(c["delta"]["content"], len(c["logprobs"]["content"])) for c in told] == [
        ("", 1),
        ("é", 1),
    ]


def test_tokens_may_be_shown_as_ids() -> None:
    rendering = context_of(logprobs=0, tokens_as_ids=True)

    (choice,) = Log(rendering).finish("ab").whole()["choices"]

    assert choice["logprobs"]["content"][0]["token"] == "token_id:2"


def test_an_impossible_token_has_a_logprob_in_json() -> None:
    """JSON has no infinity; OpenAI's API says -9999.0."""
    told = TokenLogprobs(Logprob(1, float("-inf"), b"a"))

    assert chat_logprobs([told], as_ids=False).content[0].logprob == -9999.0


def test_calls_come_in_deltas_with_dense_indexes() -> None:
    """Clients collect calls in a list by their indexes, and an id or a name that is repeated breaks
    the clients that use them as keys."""
    log = Log(context_of(tool_parser="hermes")).say(*CALLS).finish()

    chunks, (whole,) = log.chunks(), log.whole()["choices"]

    calls = calls_of(chunks)
    assert calls == whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert joined(chunks, "content") == whole["message"]["content"] == "Sure."


def test_calls_end_with_tool_calls_streamed_and_whole() -> None:
    """Another reason in the stream would end the loops of agents before their calls are made."""
    log = Log(context_of(tool_parser="hermes")).say(*CALLS).finish()

    assert log.chunks()[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert log.whole()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_was_cut_off_ends_with_length() -> None:
    log = Log(context_of(tool_parser="hermes")).say(*CALLS[:45]).finish("", "length")

    assert log.chunks()[-1]["choices"][0]["finish_reason"] == "length"
    assert log.whole()["choices"][0]["finish_reason"] == "length"


def test_a_message_of_calls_alone_has_no_content() -> None:
    log = Log(context_of(tool_parser="llama3_json")).finish('{"name": "f", "parameters": {}}')

    message = log.whole()["choices"][0]["message"]

    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"


def test_a_mistral_call_has_an_id_that_its_template_takes() -> None:
    log = Log(context_of(tool_parser="mistral")).finish('[TOOL_CALLS][{"name": "f"}]')

    (call,) = log.whole()["choices"][0]["message"]["tool_calls"]

    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@pytest.mark.parametrize("include_reasoning", [True, False])
def test_thought_stands_beside_the_content(include_reasoning: bool) -> None:
    rendering = context_of(reasoning_parser="qwen3", include_reasoning=include_reasoning)
    log = Log(rendering).say("<think>", "hm ", "m", "</think>", "\n\n", "It").finish(" is.")

    chunks, whole = log.chunks(), log.whole()

    message = whole["choices"][0]["message"]
    expected = "hm m" if include_reasoning else None
    assert message.get("reasoning_content") == expected
    assert (joined(chunks, "reasoning_content") or None) == expected
    assert message["content"] == joined(chunks, "content") == "It is."
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_reasoning_tokens_are_counted_in_events_of_any_size() -> None:
    tokens = ["<thi", "nk>", "hm ", "m</think", ">\n\n", "It", " is", ""]
    log = Log(context_of(reasoning_parser="qwen3"))

    for seed in range(20):
        whole = Log(log.rendering).tell([tokens], random.Random(seed)).whole()

        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_usage_is_sent_with_each_chunk_if_it_is_requested() -> None:
    rendering = context_of(include_usage=True, continuous_usage=True)

    chunks = Log(rendering).say("a", "b").finish("c").chunks()

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)


def test_usage_counts_a_prompt_once() -> None:
    log = Log(context_of(num_choices=2)).finish("a", num_cached_tokens=2)

    usage = log.finish("b", choice=1, num_cached_tokens=3).whole()["usage"]

    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


def test_the_fingerprint_comes_with_the_end() -> None:
    """Only the final chunks have it, as vLLM's do."""
    log = Log(context_of(fingerprint="f1", include_usage=True)).say("a").finish("b")

    assert [chunk.get("system_fingerprint") for chunk in log.chunks()] == [
        *[None] * 3,
        "f1",
        "f1",
    ]
    assert log.whole()["system_fingerprint"] == "f1"


def test_a_stop_token_is_sent_with_the_finish_reason() -> None:
    """Typed clients do not accept other values of ``finish_reason``, so details have a field of
    their own."""
    (choice,) = Log(context_of()).finish("a", stop_reason=0).whole()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)


def test_a_second_attempt_begins_nothing_anew() -> None:
    """After a migration the role is not repeated, and the prompt counts once."""
    log = Log(context_of(include_usage=True)).say("a")
    log.events.append(log.events[0])
    *chunks, usage = log.finish("b").chunks()

    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    assert usage["usage"]["prompt_tokens"] == 3


def test_an_error_is_the_last_payload() -> None:
    """OpenAI's client raises an exception for an event with a truthy ``error``. If the stream just
    ended, the answer would look complete."""
    log = Log(context_of()).say("a").fail("worker_lost")

    *_, last = log.chunks()

    assert last["error"]["code"] == "worker_lost"


def test_the_same_log_has_the_same_payloads() -> None:
    """What a take-over on another gateway rests on."""
    rendering = context_of(
        tool_parser="hermes", reasoning_parser="qwen3", logprobs=1, include_usage=True
    )
    log = Log(rendering).say("<think>hm</think>", *CALLS).finish()

    assert log.payloads() == log.payloads()


def test_prompt_logprobs_are_as_in_vllm() -> None:
    rendering = context_of(prompt_logprobs=1, is_stream=False)

    answer = Log(rendering).score().finish("x").whole()

    first, second, _ = answer["prompt_logprobs"]
    assert first is None
    assert second == {
        "99": {"logprob": -1.0, "rank": 1, "decoded_token": "best"},
        "2": {"logprob": -2.0, "rank": 2, "decoded_token": " b"},
    }


def spelled(answer: Any) -> list[str]:
    """The tokens of the logprobs in ``answer``."""
    match answer:
        case {"tokens": [*names]}:
            return names
        case {"token": str(name)}:
            return [name]
        case dict():
            return [name for value in answer.values() for name in spelled(value)]
        case list():
            return [name for value in answer for name in spelled(value)]
    return []


@pytest.mark.parametrize("num_events", [1, 2, 6])
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_tokens_of_a_stop_string_have_no_logprobs(endpoint: Endpoint, num_events: int) -> None:
    log = Log(context_of(endpoint=endpoint, logprobs=0, hides_stop=True))
    tokens = [("one", "one"), ("\n", ""), ("two", "\ntwo"), (" \n", " "), ("3", ""), (".!", "")]
    log.stop_at("\n3.", tokens, num_events=num_events)

    deltas = [c for c in log.chunks() if c.get("type") in (None, "response.output_text.delta")]

    assert spelled(deltas) == spelled(log.whole()) == ["one", "\n", "two", " \n"]


@pytest.mark.parametrize("shown", [{"tokens_as_ids": True}, {"hides_stop": False}])
def test_tokens_that_do_not_spell_the_text_include_the_stop_string(shown: dict[str, bool]) -> None:
    log = Log(context_of(logprobs=0, **{"hides_stop": True, **shown}))
    log.stop_at("ab", [("x", "x"), ("a", ""), ("b", "")], num_events=3)

    assert len(spelled(log.chunks())) == len(spelled(log.whole())) == 3


def test_a_held_text_that_no_stop_string_follows_has_all_its_logprobs() -> None:
    log = Log(context_of(logprobs=0, hides_stop=True)).say("x")
    log.finish("a", "length")

    assert spelled(log.chunks()) == spelled(log.whole()) == ["x", "a"]


@pytest.mark.parametrize("num_read", range(7))
def test_a_resumed_stream_has_the_logprobs_that_are_missing(num_read: int) -> None:
    log = Log(context_of(logprobs=0, hides_stop=True))
    tokens = [("one", "one"), ("\n", ""), ("two", "\ntwo"), ("\n", ""), ("3", "")]
    log.stop_at("\n3", tokens, num_events=5)
    frames = log.frames()

    rest = log.frames(after=frames[num_read][0]) if num_read < len(frames) else []

    assert rest == frames[num_read + 1 :]
