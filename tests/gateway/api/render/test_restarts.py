"""A log that a broker lost the end of, and a worker wrote again divided into other events: its
client is sent the bytes that it would have been sent of a log that was never lost."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.event_stream import encoder_for
from gateway.api.render.formats import Rendering
from gateway.log.cursor import LogEvent
from gateway.log.framing import ClientPosition, EventId, FramedEncoder, Framer
from gateway.log.visiting import visit
from shared.messages import Failed, Finished, Started
from tests.support.gateway.rendering import END, Log, context_of

CALL = '\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>\n'
HERMES = ["Sure", ".", *CALL, *CALL]
LLAMA = list('{"name": "f", "parameters": {"a": [1, 2]}}')
MISTRAL = [
    "[TOOL_CALLS]",
    *'[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
]
THOUGHT = [*"<think>\n", "Well", "", ", no.", *"</think>\n", "\n", "No", "."]
KINDS: list[tuple[Rendering, list[list[str]]]] = [
    (context_of(num_choices=2, include_usage=True), [["Once", "", " upon"], ["x", "y", "z"]]),
    (context_of(logprobs=1), [["Once", "", " upon"]]),
    (context_of(logprobs=1), [["Once", "", " upon", END]]),
    (context_of(is_obfuscated=True), [["Once", "", " upon"]]),
    (context_of(endpoint="responses", is_obfuscated=True), [["Once", "", " upon"]]),
    (context_of(continuous_usage=True, include_usage=True), [["Once", "", " upon"]]),
    (context_of(endpoint="completions", logprobs=1, echo=True), [["Once", " upon", END]]),
    (context_of(tool_parser="hermes"), [HERMES]),
    (context_of(tool_parser="hermes", logprobs=1), [HERMES]),
    (context_of(tool_parser="hermes", reasoning_parser="qwen3"), [THOUGHT + HERMES]),
    (context_of(reasoning_parser="qwen3", continuous_usage=True, include_usage=True), [THOUGHT]),
    (context_of(tool_parser="llama3_json"), [LLAMA]),
    (context_of(tool_parser="mistral"), [MISTRAL]),
    (context_of(endpoint="responses", tool_parser="hermes"), [HERMES]),
    (context_of(endpoint="responses", reasoning_parser="qwen3"), [THOUGHT]),
    (context_of(endpoint="responses", logprobs=1), [["Once", "", " upon", END]]),
    (context_of(endpoint="responses", logprobs=1, tool_parser="hermes"), [HERMES]),
    (
        context_of(
            endpoint="responses", logprobs=1, tool_parser="hermes", reasoning_parser="qwen3"
        ),
        [THOUGHT + HERMES],
    ),
    (context_of(endpoint="messages"), [["Once", "", " upon"]]),
    (context_of(endpoint="messages", reasoning_parser="qwen3"), [THOUGHT]),
    (
        context_of(endpoint="messages", tool_parser="hermes", reasoning_parser="qwen3"),
        [THOUGHT + HERMES],
    ),
]


def told(rendering: Rendering, texts: list[list[str]], seed: int) -> list[LogEvent]:
    log = Log(rendering)
    return (
        (log.score(1 + seed % 3) if rendering.echo else log).tell(texts, random.Random(seed)).events
    )


def undisturbed(first: list[LogEvent], second: list[LogEvent]) -> list[LogEvent]:
    """A log that is divided as the client was sent it: ``first``, and what is new in ``second``."""
    passed = ClientPosition()
    for event in first:
        if not isinstance(event, Started | Failed):
            passed.split(event)
    passed = ClientPosition.at(passed.place)
    events = list(first)
    for event in second:
        if isinstance(event, Started | Failed):
            events += [] if first else [event]
        elif (news := passed.split(event)[1]) is not None:
            events.append(news)
    return events


class Client:
    """Is sent a log's frames; the renderer starts again whenever the log does."""

    def __init__(self, rendering: Rendering, after: str = "", *, is_numbered: bool = True) -> None:
        self.sent = b""
        self._rendering = rendering
        self._framer = Framer(EventId.parse(after), is_numbered=is_numbered)
        self._encoder = FramedEncoder(self._framer, encoder_for(rendering))

    def read(self, events: list[LogEvent]) -> None:
        self.sent += b"".join([visit(event, self._encoder) for event in events])

    def restart(self) -> None:
        self._framer.restart()
        self._encoder = FramedEncoder(self._framer, encoder_for(self._rendering))

    def end(self) -> bytes:
        """All bytes."""
        return self.sent + self._framer.frame_between(self._encoder.encoder.end())


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seeds=st.lists(st.integers(0, 999), min_size=2, max_size=4),
    is_numbered=st.booleans(),
    data=st.data(),
)
def test_the_bytes_are_those_of_an_undisturbed_log(
    kind: tuple[Rendering, list[list[str]]],
    seeds: list[int],
    is_numbered: bool,
    data: st.DataObject,
) -> None:
    logs = [told(*kind, seed) for seed in seeds]
    client = Client(kind[0], is_numbered=is_numbered)
    seen: list[LogEvent] = []

    for log in logs[:-1]:
        part = log[: data.draw(st.integers(0, len(log) - 1))]
        client.read(part)
        client.restart()
        seen = undisturbed(seen, part)
    client.read(logs[-1])

    steady = Client(kind[0], is_numbered=is_numbered)
    steady.read(undisturbed(seen, logs[-1]))
    assert client.end() == steady.end()


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), seeds=st.tuples(*[st.integers(0, 999)] * 2), data=st.data())
def test_a_client_that_returned_is_sent_the_same_though_the_log_starts_again(
    kind: tuple[Rendering, list[list[str]]], seeds: tuple[int, int], data: st.DataObject
) -> None:
    """It starts again before the client's place is found, or behind it."""
    log, again = told(*kind, seeds[0]), told(*kind, seeds[0])
    ids = [event_id for event_id, _ in frames_of(kind[0], log)]
    place = data.draw(st.sampled_from(["", *ids]))
    steady, client = Client(kind[0], place), Client(kind[0], place)
    steady.read(log)

    client.read(log[: data.draw(st.integers(0, len(log)))])
    client.restart()
    client.read(again)

    assert client.end() == steady.end()


def frames_of(rendering: Rendering, events: list[LogEvent]) -> list[tuple[str, bytes]]:
    log = Log(rendering)
    log.events = events
    return log.frames()


def test_a_renderer_that_starts_again_has_sent_the_end_once() -> None:
    log = Log(context_of()).say("Once").finish(".")
    client = Client(log.rendering)
    client.read(log.events)
    assert isinstance(log.events[-1], Finished)
    sent = client.sent

    client.restart()
    client.read(log.events)

    assert client.sent == sent
