"""One request is one trace, from the HTTP request through the queue to the last token."""

import re
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.engines.brake import Brake
from tests.support.gateway.batches import ended, order
from tests.support.gateway.http import eventually, hears_a_worker, live_gateway
from tests.support.pages import ROOT
from tests.support.workers.synthetic import echo_worker

PHASES = ("worker.queue", "worker.prefill", "worker.decode")
OF_RUN = ("worker.prefill", "worker.decode", "engine.step")
CLOCKS_DIFFER_NS = 1_000_000
"""Durations are measured by another clock."""
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "echo", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}


QUICK = [
    ("/v1/embeddings", {"model": "echo", "input": "Hello"}),
    ("/v1/rerank", {"model": "echo", "query": "Hello", "documents": ["a", "b"]}),
    ("/tokenize", {"model": "echo", "prompt": "Hello"}),
    ("/detokenize", {"model": "echo", "tokens": [19556]}),
]


async def answered(
    spans: InMemorySpanExporter,
    path: str = "/v1/completions",
    body: object = BODY,
    **headers: str,
) -> dict[str, ReadableSpan]:
    """The spans of a request, by name."""
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await gateway.http.post(path, json=body, headers=headers)
    finished = spans.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished)
    return {span.name: span for span in finished}


def ids(span: ReadableSpan) -> tuple[int, int]:
    """The ids of trace and span."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def times_of(span: ReadableSpan) -> tuple[int, int]:
    """The Unix times of start and end, in nanoseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def test_gateway_queue_run_and_its_steps_are_one_trace(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans)

    assert by_name.keys() >= {"gateway.request", "worker.run", "engine.step", *PHASES}
    assert len({ids(span)[0] for span in by_name.values()}) == 1
    _, request_id = ids(by_name["gateway.request"])
    _, run_id = ids(by_name["worker.run"])
    assert {parent_id(by_name[name]) for name in ("worker.queue", "worker.run")} == {request_id}
    assert {parent_id(by_name[name]) for name in OF_RUN} == {run_id}


async def test_every_span_is_one_of_the_documentation(spans: InMemorySpanExporter) -> None:
    _, _, table = (ROOT / "docs/observability.md").read_text().partition("| Span | Meaning |")
    documented = set(re.findall(r"`(\w+\.\w+)`", table.partition("\n\n")[0]))

    by_name = await answered(spans)

    assert by_name.keys() - documented == set()


async def test_the_phases_follow_one_another(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans)

    # A phase lasts as long as it took, but is recorded to end when this is noticed.
    times = [times_of(by_name[name]) for name in PHASES]
    ends = [end for _, end in times]
    assert ends == sorted(ends)
    assert sum(end - start for start, end in times) <= ends[-1] - times[0][0] + CLOCKS_DIFFER_NS


async def test_a_caller_that_traces_is_the_parent(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans, traceparent=CALLER)

    assert {f"{ids(span)[0]:032x}" for span in by_name.values()} == {CALLER.split("-")[1]}


async def test_no_span_holds_a_prompt_or_an_answer(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans)

    assert "Hello" not in "".join(span.to_json() for span in by_name.values())


@pytest.mark.parametrize(("path", "body"), QUICK, ids=[path for path, _ in QUICK])
async def test_a_quick_job_is_in_the_trace_of_its_caller(
    spans: InMemorySpanExporter, path: str, body: object
) -> None:
    by_name = await answered(spans, path, body, traceparent=CALLER)

    assert by_name.keys() >= {"gateway.request", "worker.queue", "worker.run"}
    assert {f"{ids(span)[0]:032x}" for span in by_name.values()} == {CALLER.split("-")[1]}
    _, request_id = ids(by_name["gateway.request"])
    assert {parent_id(by_name[name]) for name in ("worker.queue", "worker.run")} == {request_id}
    assert "Hello" not in "".join(span.to_json() for span in by_name.values())
    facts = by_name["worker.run"].attributes or {}
    assert (facts["warren.class"], facts["gen_ai.request.model"]) == ("quick", "echo")


async def test_the_tokens_that_a_truncation_counts_are_in_the_trace_of_their_request(
    spans: InMemorySpanExporter,
) -> None:
    turns = [{"role": role, "content": "Hello"} for role in ("user", "assistant", "user")]
    body = {"model": "echo", "input": turns, "truncation": "auto", "max_output_tokens": 3}
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await gateway.post("/v1/responses", **body)

    by_class = {span.attributes["warren.class"]: span for span in runs(spans) if span.attributes}
    assert by_class.keys() == {"quick", "interactive"}
    assert len({ids(span)[0] for span in by_class.values()}) == 1


async def test_each_line_of_a_batch_is_a_trace_that_names_the_batch(
    spans: InMemorySpanExporter,
) -> None:
    lines = [
        {"custom_id": str(k), "method": "POST", "url": "/v1/completions", "body": BODY}
        for k in range(2)
    ]
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await hears_a_worker(gateway)
        batch = await ended(gateway, await order(gateway, lines, endpoint="/v1/completions"))

    found = [span for span in spans.get_finished_spans() if span.name == "gateway.batch_line"]
    by_trace = {ids(span)[0]: span for span in found}
    assert len(by_trace) == 2
    assert {(span.attributes or {})["warren.line"] for span in found} == {1, 2}
    for span in found:
        assert span.attributes is not None
        assert (span.attributes["warren.batch"], span.attributes["model"]) == (batch.id, "echo")
    assert len(runs(spans)) == 2
    for run in runs(spans):
        line = by_trace[ids(run)[0]]
        assert parent_id(run) == ids(line)[1]
        assert run.attributes is not None
        assert line.attributes is not None
        assert line.attributes["warren.request_id"] == run.attributes["warren.request_id"]
    assert "Hello" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_an_embedding_of_a_batch_is_in_the_trace_of_its_line(
    spans: InMemorySpanExporter,
) -> None:
    endpoint, body = QUICK[0]
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await hears_a_worker(gateway)
        await ended(gateway, await order(gateway, [line], endpoint=endpoint))

    (run,) = runs(spans)
    (of_line,) = (one for one in spans.get_finished_spans() if one.name == "gateway.batch_line")
    assert (ids(run)[0], parent_id(run)) == ids(of_line)


async def test_steps_are_sampled(spans: InMemorySpanExporter) -> None:
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await gateway.http.post("/v1/completions", json={**BODY, "max_tokens": 200})

    names = Counter(span.name for span in spans.get_finished_spans())
    assert 2 <= names["engine.step"] <= 4


async def test_a_run_that_continues_another_one_links_to_it(spans: InMemorySpanExporter) -> None:
    brake = Brake(4)  # or the answer may have ended before its worker leaves
    broker = MemoryBroker()
    body = {**BODY, "max_tokens": 300, "stream": True}
    async with live_gateway(broker) as gateway, AsyncExitStack() as streams:
        async with echo_worker(broker, brake=brake, drain_grace_s=0.1):
            stream = gateway.http.stream("POST", "/v1/completions", json=body)
            response = await streams.enter_async_context(stream)
            lines = response.aiter_lines()
            await anext(lines)
        async with echo_worker(broker):
            async for _ in lines:
                pass
        await streams.aclose()

        async def have_ended() -> bool:
            return len(runs(spans)) == 2

        await eventually(have_ended)

    names = Counter(span.name for span in spans.get_finished_spans())
    assert names["worker.queue"] == 1
    handed_over, continued = runs(spans)
    (link,) = continued.links
    assert (link.context.trace_id, link.context.span_id) == ids(handed_over)
    assert link.attributes is not None
    assert link.attributes["warren.reason"] == "handed over"


def runs(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of a job's runs, in the order of their ends."""
    return [span for span in spans.get_finished_spans() if span.name == "worker.run"]
