"""One request is one trace, from the HTTP request through the queue to the last token."""

from itertools import pairwise

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.bus.memory import MemoryBus
from tests.support.http import live_gateway
from tests.support.workers import echo_worker

WORKER = ("worker.queue", "worker.prefill", "worker.decode")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def answered(spans: InMemorySpanExporter, **headers: str) -> dict[str, ReadableSpan]:
    """The spans of one request, by name."""
    body = {"model": "echo", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        response = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    finished = spans.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished)
    return {span.name: span for span in finished}


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


async def test_gateway_queue_prefill_and_decode_are_one_trace(
    spans: InMemorySpanExporter,
) -> None:
    by_name = await answered(spans)

    assert len({trace_id(span) for span in by_name.values()}) == 1
    request = by_name["gateway.request"].context
    parents = [by_name[name].parent for name in WORKER]
    assert request is not None
    assert [parent and parent.span_id for parent in parents] == [request.span_id] * 3


async def test_the_workers_spans_follow_one_another(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans)

    for before, after in pairwise(by_name[name] for name in WORKER):
        assert before.end_time is not None
        assert after.start_time is not None
        assert before.end_time <= after.start_time


async def test_a_caller_that_traces_is_the_parent(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans, traceparent=CALLER)

    assert {f"{trace_id(span):032x}" for span in by_name.values()} == {CALLER.split("-")[1]}


async def test_no_span_holds_a_prompt_or_an_answer(spans: InMemorySpanExporter) -> None:
    by_name = await answered(spans)

    assert "Hello" not in "".join(span.to_json() for span in by_name.values())
