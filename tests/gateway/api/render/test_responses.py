"""How a response is worded: whole, and as events."""

import json
import random
from typing import Any

import msgspec
import pytest

from gateway.api.bodies.input_items import conversation_of, stored_items
from gateway.api.render.responses import ResponseEncoder
from gateway.api.routes.responses import echoed
from gateway.log.framing import EventId, FramedEncoder, Framer
from shared.errors import ShuttingDown, TakenOver, WarrenError
from shared.messages import ChatMessage, Failed
from tests.support.gateway.rendering import Log, context_of

CALL = 'Sure. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CUSTOM_CALL = 'Sure. <tool_call>{"name": "f", "arguments": {"input": "\\u00e9"}}</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def response_log(**fields: Any) -> Log:
    return Log(context_of(endpoint="responses", request_id="resp_1", **fields))


def test_a_call_is_an_item_of_its_own() -> None:
    log = response_log(tool_parser="hermes").say(*CALL).finish()

    message, call = log.whole()["output"]

    assert message["content"][0]["text"] == "Sure."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert call["call_id"].startswith("call_")
    deltas = [event for event in log.chunks() if event["type"].endswith("arguments.delta")]
    assert "".join(delta["delta"] for delta in deltas) == call["arguments"]


def test_a_call_of_a_custom_tool_is_an_item_of_its_own() -> None:
    log = response_log(tool_parser="hermes", custom_tools=("f",)).say(*CUSTOM_CALL).finish()

    _, call = log.whole()["output"]

    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "f", "é")
    kinds = [event["type"] for event in log.chunks()]
    assert kinds.count("response.custom_tool_call_input.delta") == 1
    assert kinds.count("response.custom_tool_call_input.done") == 1


def test_a_response_whose_job_failed_is_failed_whatever_the_error() -> None:
    *_, last = response_log().fail("service_unavailable").chunks()

    assert last["type"] == "response.failed"


def test_a_failure_before_the_start_has_the_same_numbers_in_a_resumed_stream() -> None:
    failed = Failed(code="deadline_exceeded", message="Too late.")

    def frames(framer: Framer) -> list[bytes]:
        encoder = ResponseEncoder(context_of(endpoint="responses", request_id="resp_1"))
        return FramedEncoder(framer, encoder).on_failure(failed).split(b"\n\n")[:-1]

    sent = frames(Framer())

    assert len(sent) == 3
    for k, frame in enumerate(sent):
        last_id = frame.partition(b"\n")[0].removeprefix(b"id: ").decode()
        assert frames(Framer(EventId.parse(last_id))) == sent[k + 1 :]
        assert frames(Framer(after_number=k)) == sent[k + 1 :]


@pytest.mark.parametrize("error", [TakenOver("Another reads."), ShuttingDown("Go elsewhere.")])
def test_a_stream_that_ends_before_its_response_does_not_call_it_failed(error: WarrenError) -> None:
    encoder = ResponseEncoder(context_of(endpoint="responses"))

    *_, payload = encoder.fail(error)

    event = json.loads(payload.data + b"7" + (payload.after_number or b""))
    expected = {"type": "error", "code": error.code, "message": error.message, "param": None}
    assert event == {**expected, "sequence_number": 7}


@pytest.mark.parametrize(
    "log",
    [
        response_log().say("a").finish("b"),
        response_log().say("a").finish("", "length"),
        response_log().finish(),
        response_log(logprobs=1).say("a").finish("b"),
        response_log(tool_parser="hermes", reasoning_parser="qwen3", logprobs=0)
        .say("<think>", "hm", "</think>", *CALL)
        .finish(),
        response_log(tool_parser="hermes", custom_tools=("f",)).say(*CUSTOM_CALL).finish(),
        response_log(tool_parser="hermes", custom_tools=("f",)).say(*CALL).finish(),
    ],
)
def test_a_stream_ends_with_the_whole_response(log: Log) -> None:
    events = log.chunks()

    assert events[-1]["response"] == log.whole()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [kind for kind, _ in log.payloads()] == [event["type"] for event in events]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == log.whole()["output"]


def test_a_message_has_the_logprobs_of_all_tokens_since_the_piece_before() -> None:
    tokens = ["Su", "", "re", *CALL.removeprefix("Sure"), " Done", "."]
    log = response_log(tool_parser="hermes", logprobs=0)

    for seed in range(20):
        output = Log(log.rendering).tell([tokens], random.Random(seed)).whole()["output"]

        first, _, last = ([item.get("content", [])] for item in output)
        words = [[w["token"] for w in part["logprobs"]] for (part,) in (*first, *last)]
        assert words == [["Su", "", "re", "."], [*"}</tool_call>", " Done", "."]]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    response = response_log().finish("a", "length").whole()

    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_failure_is_an_event() -> None:
    *_, last = response_log().say("a").fail("worker_lost").chunks()

    assert last["type"] == "response.failed"
    error = last["response"]["error"]
    assert (error["code"], error["reason"]) == ("server_error", "worker_lost")


@pytest.mark.parametrize(
    ("log", "closing"),
    [
        (
            response_log().say("a"),
            ["response.output_text.done", "response.content_part.done"],
        ),
        (
            response_log(tool_parser="hermes").say('<tool_call>{"name": "f", "arguments": {"a"'),
            ["response.function_call_arguments.done"],
        ),
        (response_log(), None),
    ],
)
def test_a_failure_leaves_what_is_open_incomplete(log: Log, closing: list[str] | None) -> None:
    before = len(log.chunks())

    events = log.fail("worker_lost").chunks()[before:]

    ends = [] if closing is None else [*closing, "response.output_item.done"]
    assert [event["type"] for event in events] == [*ends, "response.failed"]
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["incomplete"] * bool(closing)
    assert [event["item"] for event in events[:-1] if "item" in event] == output


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "What is the weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "?"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]

    system, user, assistant, tool = conversation_of("Be brief.", items)

    assert (system.role, user.role) == ("system", "user")
    assert (assistant.content, assistant.reasoning_content) == ("?", "hm")
    assert [call.id for call in assistant.tool_calls] == ["1", "2"]
    assert tool == ChatMessage(role="tool", tool_call_id="1", content="rain")


CUSTOM = [
    {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'},
    {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
]


def test_the_summary_of_a_thought_is_read_if_there_is_nothing_else() -> None:
    summary = [{"type": "summary_text", "text": "They ask."}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "x"}
    items = [thought, {"type": "message", "role": "assistant", "content": "Yes."}]

    (assistant,) = conversation_of(None, items)
    stored, _ = stored_items(items)

    assert assistant.reasoning_content == "They ask."
    assert (stored["summary"], stored["content"]) == (summary, [])


def test_calls_of_custom_tools_become_calls_with_an_input() -> None:
    assistant, tool = conversation_of(None, CUSTOM)

    (call,) = assistant.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("1", "patch", {"input": 'a "b"'})
    assert tool == ChatMessage(role="tool", tool_call_id="1", content="done")


def test_calls_of_custom_tools_are_stored_as_they_are() -> None:
    stored = stored_items(CUSTOM)

    told = [{name: one[name] for name in one if name != "id"} for one in stored]
    assert told == [{**one, "status": "completed"} for one in CUSTOM]
    assert conversation_of(None, stored) == conversation_of(None, CUSTOM)


def test_a_response_repeats_its_request() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    asked = {"input": "x", "tools": [TOOL], "tool_choice": choice, "top_p": 0.5}

    repeated = json.loads(echoed(msgspec.json.encode(asked)))

    assert (repeated["top_p"], repeated["instructions"]) == (0.5, None)
    assert repeated["tools"] == [{**TOOL, "strict": None}]
    assert repeated["tool_choice"] == {"type": "function", "name": "f"}
