"""The life of a request in the logs of gateway and workers, with a worker that dies in between."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.telemetry import requests
from tests.support.engines.brake import Brake
from tests.support.gateway.batches import ended, order
from tests.support.gateway.http import (
    LiveGateway,
    eventually,
    hears_a_worker,
    live_gateway,
    two_gateways,
)
from tests.support.workers.jobs import ask, new_job
from tests.support.workers.synthetic import doomed_worker, echo_worker

NUM_BEGUN = 3
"""The tokens of an answer in whose middle something happens."""
RETURNING: dict[str, Any] = {"disconnect_grace_s": 60.0}
"""A gateway and a worker whose client may stay away for long."""
PROMPT = "a secret about badgers"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"accept": "text/event-stream", "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
BODY = {
    "model": "echo",
    "prompt": PROMPT,
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
}


def job_records(caplog: pytest.LogCaptureFixture, *steps: str) -> list[dict[str, Any]]:
    """The fields of these lines, or of all, in order, with ``step``."""
    return [
        {**vars(record), "step": record.message}
        for record in caplog.records
        if record.name == requests.LOGGER and (not steps or record.message in steps)
    ]


async def is_logged(caplog: pytest.LogCaptureFixture, step: str, num_times: int = 1) -> bool:
    return len(job_records(caplog, step)) == num_times


def texts(records: Iterable[logging.LogRecord]) -> str:
    """Everything in these records, as a text."""
    return "\n".join(str(vars(record)) for record in records)


@asynccontextmanager
async def streaming(gateway: LiveGateway) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream that has begun."""
    async with gateway.http.stream(
        "POST", "/v1/completions", json=BODY, headers=HEADERS
    ) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass
        yield lines


async def text_of(lines: AsyncIterator[str]) -> str:
    chunks = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


async def test_each_step_of_a_request_whose_worker_dies_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker, brake = MemoryBroker(), Brake(NUM_BEGUN + 1)
    async with live_gateway(broker) as gateway, AsyncExitStack() as streams:
        async with doomed_worker(broker, brake=brake):
            await hears_a_worker(gateway)
            lines = await streams.enter_async_context(streaming(gateway))
        async with echo_worker(broker):
            text = await text_of(lines)
        await streams.aclose()

        await eventually(lambda: is_logged(caplog, "request ended"))

    lives = job_records(caplog)
    assert [life["step"] for life in lives[:2]] == ["request accepted", "job started"]
    assert sorted(life["step"] for life in lives[2:]) == [
        "job ended",
        "job taken over",
        "request ended",
        "request taken over",
    ]
    assert {(life["request_id"], life["model"], life["trace_id"]) for life in lives} == {
        (lives[0]["request_id"], "echo", TRACE_ID)
    }
    started, *_ = job_records(caplog, "job started")
    assert started["queue_s"] >= 0
    for step in ("job taken over", "request taken over"):
        (taken_over,) = job_records(caplog, step)
        assert taken_over["from_worker"] == started["worker"] != taken_over["worker"]
        assert taken_over["reason"] == "worker lost"
        assert (taken_over["attempt"], taken_over["at_token"] > 0) == (2, True)
        assert taken_over["levelname"] == "WARNING"
        assert "queue_s" not in taken_over  # most of it would be the first worker's run
    assert text
    assert PROMPT not in texts(caplog.records)
    assert text[:20] not in texts(caplog.records)


async def test_a_request_repeated_before_its_job_has_started_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker, brake = MemoryBroker(), Brake(NUM_BEGUN + 1)
    jobs = topology.jobs_queue("echo", "interactive")
    headers = {"idempotency-key": "order-66"}
    asked: list[asyncio.Task[httpx.Response]] = []
    async with two_gateways(broker) as gateways, MemoryBus(broker) as bus:
        async with doomed_worker(broker):
            for gateway in gateways:
                await hears_a_worker(gateway)
        async with bus.consume(jobs.name) as queue:
            published = []
            for gateway in gateways:
                post = gateway.http.post("/v1/completions", json=BODY, headers=headers)
                asked.append(asyncio.create_task(post))
                published.append(await anext(queue))
            for delivery in published:
                await delivery.ack()
        async with echo_worker(broker, brake=brake):
            for num_started, delivery in enumerate(published):
                await eventually(partial(is_logged, caplog, "job started", num_started))
                await bus.publish(jobs.bindings[0], delivery.message)
            await eventually(partial(is_logged, caplog, "job taken over"))
            brake.release()
            _, answer = await asyncio.gather(*asked)

    assert answer.text.endswith("data: [DONE]\n\n")
    for step in ("job taken over", "request taken over"):
        (taken_over,) = job_records(caplog, step)
        assert (taken_over["reason"], taken_over["levelname"]) == ("requested again", "INFO")
    runs = job_records(caplog, "job started", "job taken over")
    assert [run["execution"] > 0 for run in runs] == [True, True]
    assert len({run["execution"] for run in runs}) == 1


async def test_a_drain_says_what_it_waits_for_and_hands_over_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker, brake = MemoryBroker(), Brake(NUM_BEGUN + 1)
    async with live_gateway(broker) as gateway, AsyncExitStack() as streams:
        async with echo_worker(broker, brake=brake, drain_grace_s=0.1):
            await hears_a_worker(gateway)
            lines = await streams.enter_async_context(streaming(gateway))
        async with echo_worker(broker):
            await text_of(lines)
        await streams.aclose()

    (handed_over,) = job_records(caplog, "job handed over")
    assert handed_over["reason"] == "drain"
    (taken_over,) = job_records(caplog, "job taken over")
    assert (taken_over["reason"], taken_over["levelname"]) == ("handed over", "INFO")
    draining, *_ = [
        vars(r) for r in caplog.records if r.message == "draining" and "jobs" in vars(r)
    ]
    assert draining["request_ids"] == [handed_over["request_id"]]


async def test_a_refused_request_has_one_line_and_is_counted_by_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with MemoryBus() as bus, live_gateway(bus) as gateway:
        response = await gateway.http.post("/v1/completions", json=BODY)
        num_refused = await gateway.sample("warren_gateway_requests_refused_total")

    (refused,) = job_records(caplog)
    assert (refused["step"], refused["status"]) == ("request refused", 404)
    assert (refused["code"], refused["path"]) == ("model_not_found", "/v1/completions")
    assert refused["model"] == "echo"
    assert refused["request_id"] == response.headers["x-request-id"]
    assert int(refused["trace_id"], 16) > 0
    assert num_refused == 1
    assert PROMPT not in texts(caplog.records)


async def test_lines_about_jobs_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    jobs = logging.getLogger("warren.jobs")
    caplog.set_level(logging.INFO)
    jobs.setLevel(logging.CRITICAL + 1)
    try:
        async with MemoryBus() as bus, live_gateway(bus) as gateway:
            await gateway.http.post("/v1/completions", json=BODY)
    finally:
        jobs.setLevel(logging.NOTSET)

    assert job_records(caplog) == []


async def test_a_job_that_nobody_can_decode_is_a_dead_letter_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def has_a_line() -> bool:
        return bool(job_records(caplog))

    async with MemoryBus() as bus, echo_worker(bus):
        message = Message(b"no job", correlation_id="mine")
        await bus.publish(topology.jobs_binding("echo", "interactive"), message)
        await eventually(has_a_line)

    (dead,) = job_records(caplog)
    assert (dead["step"], dead["request_id"], dead["model"]) == (
        "job dead-lettered",
        "mine",
        "echo",
    )
    assert dead["reason"]
    assert dead["worker"].startswith("worker.")


async def test_a_job_that_does_not_start_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with MemoryBus() as bus, echo_worker(bus):
        await ask(bus, new_job("echo", deadline=1.0))

    (refused,) = job_records(caplog)
    assert (refused["step"], refused["outcome"]) == ("job refused", "deadline_exceeded")
    assert (refused["class"], refused["attempt"]) == ("interactive", 1)
    assert refused["worker"].startswith("worker.")


async def test_a_client_that_comes_back_has_lines_with_its_requests_model_and_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also at the end, which its first line did not see; the request is counted once."""
    caplog.set_level(logging.INFO)
    broker, brake = MemoryBroker(), Brake(NUM_BEGUN + 1)
    async with (
        live_gateway(broker, **RETURNING) as gateway,
        echo_worker(broker, brake=brake, **RETURNING),
    ):
        await hears_a_worker(gateway)
        async with streaming(gateway):
            pass
        (accepted,) = job_records(caplog, "request accepted")
        await eventually(partial(is_logged, caplog, "request ended"))
        brake.release()
        await gateway.http.get(f"/v1/streams/{accepted['request_id']}")
        num_counted = await gateway.sample("warren_gateway_requests_total")

    (resumed,) = job_records(caplog, "stream resumed")
    left, ended = job_records(caplog, "request ended")
    for line in (resumed, ended):
        assert line["request_id"] == accepted["request_id"]
        assert (line["model"], line["trace_id"]) == ("echo", TRACE_ID)
    assert (left["status"], "resumed" in left) == (499, False)
    assert (ended["status"], ended["resumed"]) == (200, True)
    assert (ended["completion_tokens"], ended["attempt"]) == (BODY["max_tokens"], 1)
    assert "code" not in ended
    assert num_counted == 1


async def test_a_resumed_stream_that_is_cancelled_ends_and_one_that_is_taken_over_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    broker, brake = MemoryBroker(), Brake(NUM_BEGUN + 1)
    async with (
        live_gateway(broker, **RETURNING) as gateway,
        echo_worker(broker, brake=brake, **RETURNING),
        AsyncExitStack() as streams,
    ):
        await hears_a_worker(gateway)
        async with streaming(gateway):
            pass
        await eventually(partial(is_logged, caplog, "request ended"))
        (accepted,) = job_records(caplog, "request accepted")
        path = f"/v1/streams/{accepted['request_id']}"
        for _ in range(2):
            response = await streams.enter_async_context(gateway.http.stream("GET", path))
            await anext(response.aiter_lines())
        await gateway.http.delete(path)
        await eventually(partial(is_logged, caplog, "request ended", 2))

    _, ended = job_records(caplog, "request ended")
    assert (ended["resumed"], ended["code"]) == (True, "cancelled")


async def test_lines_about_a_line_of_a_batch_have_one_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if it is tried again."""
    caplog.set_level(logging.INFO)
    steps = "request accepted", "job started", "job ended", "request ended"
    body = {name: value for name, value in BODY.items() if name != "stream"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    brake = Brake(NUM_BEGUN + 1)
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus, brake=brake):
        await hears_a_worker(gateway)
        batch = await order(gateway, [line], endpoint="/v1/completions")
        await eventually(partial(is_logged, caplog, "job started"))
        (started,) = job_records(caplog, "job started")
        await gateway.http.delete(f"/v1/streams/{started['request_id']}")
        await eventually(partial(is_logged, caplog, "job ended"))
        brake.release()
        await ended(gateway, batch)

    assert [len(job_records(caplog, step)) for step in steps] == [2, 2, 2, 2]
    assert {life["request_id"] for life in job_records(caplog, *steps)} == {started["request_id"]}
    assert {life["trace_id"] for life in job_records(caplog, *steps)} == {started["trace_id"]}


async def test_lines_about_a_request_without_a_trace_have_the_id_of_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with MemoryBus() as bus, live_gateway(bus) as gateway, echo_worker(bus):
        await hears_a_worker(gateway)
        for _ in range(2):
            await gateway.http.post("/v1/completions", json={**BODY, "stream": False})

    traces: dict[str, set[str]] = {}
    for life in job_records(caplog):
        traces.setdefault(life["request_id"], set()).add(life["trace_id"])
    first, second = traces.values()
    assert (len(first), len(second)) == (1, 1)
    assert first != second
