"""The ids of events: a client that comes back with any of them misses and repeats nothing."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.render.formats import Rendering
from gateway.log.framing import START, EventId, Framer, Payload
from shared.errors import InvalidRequest
from tests.support.gateway.rendering import END, Log, context_of

PLAIN = ["", "Once", " upon", "", " a", " time", "é", ".", ""]
THOUGHT = [*"<think>\n", "Well", ", no.", *"</think>\n", "\n", "No", "."]
CALLS = [
    "Sure.",
    *'\n<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>\n',
    *'<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
]
KINDS: list[tuple[Rendering, list[list[str]]]] = [
    (context_of(), [PLAIN]),
    (context_of(num_choices=3, include_usage=True), [PLAIN, PLAIN[:4], ["x"]]),
    (context_of(logprobs=1), [PLAIN]),
    (context_of(logprobs=1), [[*PLAIN, END]]),
    (context_of(num_choices=2, is_obfuscated=True, include_usage=True), [PLAIN, PLAIN]),
    (context_of(endpoint="responses", is_obfuscated=True), [PLAIN]),
    (context_of(endpoint="completions", logprobs=1, echo=True), [PLAIN]),
    (context_of(reasoning_parser="qwen3", num_choices=2), [THOUGHT, THOUGHT]),
    (context_of(tool_parser="hermes"), [CALLS]),
    (context_of(tool_parser="hermes", reasoning_parser="qwen3"), [THOUGHT + CALLS]),
    (context_of(logprobs=1, tool_parser="hermes"), [CALLS]),
    (context_of(endpoint="responses", tool_parser="hermes"), [CALLS]),
    (context_of(endpoint="responses", logprobs=1), [PLAIN]),
    (context_of(endpoint="responses", logprobs=1, tool_parser="hermes"), [[*CALLS, END]]),
    (
        context_of(
            endpoint="responses", logprobs=1, tool_parser="hermes", reasoning_parser="qwen3"
        ),
        [THOUGHT + CALLS],
    ),
    (context_of(endpoint="messages"), [PLAIN]),
    (
        context_of(endpoint="messages", tool_parser="hermes", reasoning_parser="qwen3"),
        [THOUGHT + CALLS],
    ),
]


def told(rendering: Rendering, texts: list[list[str]], seed: int) -> Log:
    dice, log = random.Random(seed), Log(rendering)
    return (log.score(dice.randint(1, 3)) if rendering.echo else log).tell(texts, dice)


def whole_of(frames: Iterable[tuple[str, bytes]]) -> dict[Any, Any]:
    """What a client puts together: texts are joined, lists grow, all else is kept in order."""
    whole: defaultdict[Any, Any] = defaultdict(list)
    for _, data in frames:
        chunk: dict[str, Any] = json.loads(data)
        if chunk.pop("sequence_number", None) is not None:
            news = {"delta": chunk.pop("delta", ""), "logprobs": chunk.pop("logprobs", [])}
            place = chunk["type"], chunk.get("output_index")
            _merge(whole, place, news)
            whole["events"] += [] if news["delta"] else [chunk]
        elif chunk.get("type") == "content_block_delta":
            kind = chunk["delta"].pop("type")
            _merge(whole, (kind, chunk["index"]), chunk["delta"])
        elif "type" in chunk:
            whole["events"].append(chunk)
        for choice in chunk.pop("choices", ()):
            _merge(whole, (choice.pop("index"),), choice)
        whole["usage"].append(chunk.get("usage"))
    told = {key: [part for part in parts if part not in (None, "")] for key, parts in whole.items()}
    return {
        key: "".join(parts) if all(isinstance(part, str) for part in parts) else parts
        for key, parts in told.items()
        if parts
    }


def _merge(whole: defaultdict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _merge(whole, (*path, key), inner)
    elif path[-1] == "tool_calls":
        for call in value:
            _merge(whole, (*path, call.pop("index")), call)
    elif isinstance(value, list):
        whole[path] += value
    else:
        whole[path].append(value)


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 999), data=st.data())
def test_whoever_comes_back_with_an_id_gets_exactly_what_follows(
    kind: tuple[Rendering, list[list[str]]], seed: int, data: st.DataObject
) -> None:
    log = told(*kind, seed)
    frames = log.frames()
    place = data.draw(st.integers(0, len(frames) - 1))

    assert log.frames(frames[place][0]) == frames[place + 1 :]
    assert len(frames) == len([data for _, data in log.payloads() if data != b"[DONE]"])
    assert len({event_id for event_id, _ in frames}) == len(frames)


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), seeds=st.tuples(*[st.integers(0, 999)] * 2), data=st.data())
def test_an_id_means_the_same_in_a_log_that_was_written_again_in_other_pieces(
    kind: tuple[Rendering, list[list[str]]], seeds: tuple[int, int], data: st.DataObject
) -> None:
    frames, again = told(*kind, seeds[0]).frames(), told(*kind, seeds[1])
    has_parsers = kind[0].tool_parser is not None or kind[0].reasoning_parser is not None
    places = [k for k, (i, _) in enumerate(frames) if not has_parsers or "~" not in i]
    place = data.draw(st.sampled_from(places))

    both = frames[: place + 1] + again.frames(frames[place][0])

    assert whole_of(both) == whole_of(frames)


def test_the_opening_of_an_item_is_not_repeated_if_a_token_without_text_came_alone() -> None:
    rendering, texts = context_of(endpoint="responses", logprobs=1), [["", "Once", "."]]
    logs = [Log(rendering).tell(texts, random.Random(seed)) for seed in range(12)]

    for first, second in itertools.product(logs, logs):
        frames = first.frames()
        for place, (event_id, _) in enumerate(frames):
            both = frames[: place + 1] + second.frames(event_id)
            assert whole_of(both) == whole_of(frames)


@pytest.mark.parametrize("last", [".", ""])
def test_a_failure_is_sent_to_those_who_have_not_seen_it_and_to_nobody_twice(last: str) -> None:
    *_, (last_id, _) = Log(context_of()).say("Once").finish(last).frames()
    again = Log(context_of()).say("Once", last).fail("worker_lost")

    frames = again.frames(last_id.removesuffix("e"))
    (failure_id, failure), *_ = frames

    assert json.loads(failure)["error"]["code"] == "worker_lost"
    assert failure_id not in [event_id for event_id, _ in again.frames(failure_id)]


def test_an_id_counts_tokens_and_characters() -> None:
    log = Log(context_of()).say("Once", "", " é").finish(".")

    ids = [event_id for event_id, _ in log.frames()]

    assert ids == ["~1", "1.4", "3.6", "4.7", "4.7e"]


def test_an_event_without_an_id_may_say_when_to_come_back() -> None:
    frame = Framer().frame_unnumbered(Payload(b"{}"), retry_ms=500)

    assert frame == b"retry: 500\ndata: {}\n\n"


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "-1",
        "1",
        "1.",
        ".1",
        "1.2.3",
        "1.2_",
        "1.2f",
        "0.0_" * 300 + "0.0",
        "1e3",
        "١.1",
        f"1.{'9' * 10}",
        " 1.1",
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        EventId.parse(text)


def test_no_id_is_the_start() -> None:
    assert EventId.parse("") == START
