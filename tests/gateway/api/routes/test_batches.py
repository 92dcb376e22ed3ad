import asyncio
import json
import logging
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from openai.types import Batch

from gateway.intake.keys.key_file import KeyFile
from gateway.store.batches import Order, TokensUsed
from gateway.store.database import SQLITE_FILE
from gateway.store.state import Store
from shared import settings, topology
from shared.bus.base import Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Cancel, EmbeddingJob
from shared.settings import GatewaySettings
from tests.support.gateway.batches import chat, ended, jsonl, order, output, texts, until
from tests.support.gateway.http import (
    LiveGateway,
    events,
    eventually,
    live_gateway,
    skip,
    two_gateways,
)
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    count_words,
    repeat_the_prompt,
    start_only,
    wait_before_the_end,
)


def has_answers(batch: Batch) -> bool:
    return batch.request_counts is not None and batch.request_counts.completed > 0


def ending_times(batch: Batch) -> set[str]:
    """Which of the times at which a batch ends, or begins to, it has. None is before it began."""
    names = ("completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
    times = {name: at for name in names if (at := getattr(batch, name)) is not None}
    assert all(batch.created_at <= at <= time.time() for at in times.values())
    return set(times)


def used(batch: Batch) -> TokensUsed:
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    return TokensUsed(
        batch.usage.input_tokens,
        batch.usage.input_tokens_details.cached_tokens,
        batch.usage.output_tokens,
        batch.usage.output_tokens_details.reasoning_tokens,
    )


def used_in(answers: list[Any]) -> TokensUsed:
    """The sums over the lines of an output file."""
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    names = ("prompt", "completion") if "prompt_tokens" in usages[0] else ("input", "output")
    prompt, output = (f"{name}_tokens" for name in names)
    rows = [
        (
            usage[prompt],
            usage.get(f"{prompt}_details", {}).get("cached_tokens", 0),
            usage.get(output, 0),
            usage.get(f"{output}_details", {}).get("reasoning_tokens", 0),
        )
        for usage in usages
    ]
    return TokensUsed(*map(sum, zip(*rows, strict=True)))


async def test_a_client_of_openai_runs_a_batch(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    lines = [chat(f"line {k}", f"number {k}") for k in range(100)]

    batch = await ended(storing, await order(storing, lines, metadata={"for": "a test"}))

    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert batch.metadata == {"for": "a test"}
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert None not in times
    assert ending_times(batch) == {"completed_at"}
    assert list(times) == sorted(times, key=lambda at: at or 0)
    answers = await output(storing, batch.output_file_id)
    assert texts(answers) == {f"line {k}": f"number {k}" for k in range(100)}
    assert [answer["custom_id"] for answer in answers] == [f"line {k}" for k in range(100)]
    assert used(batch) == used_in(answers)
    outputs = [file.id async for file in storing.openai.files.list(purpose="batch_output")]
    assert outputs == [batch.output_file_id]
    assert {job.lane for job in worker.jobs} == {"batch"}
    first = answers[0]
    assert first["id"].startswith("batch_req_")
    assert (first["error"], first["response"]["status_code"]) == (None, 200)
    assert first["response"]["request_id"] == first["response"]["body"]["id"]


async def test_a_gateway_forgets_the_answers_that_files_contain(
    storing: LiveGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    await ended(storing, await order(storing, [chat("a"), chat("b")]))

    async def are_forgotten() -> bool:
        with closing(sqlite3.connect(tmp_path / SQLITE_FILE)) as database:
            (num_answers,) = database.execute("SELECT count(*) FROM batch_answers").fetchone()
        return bool(num_answers == 0)

    await eventually(are_forgotten)


async def test_batches_are_listed_newest_first(storing: LiveGateway) -> None:
    made = [await order(storing, [chat("a")]) for _ in range(3)]

    listed = [batch.id async for batch in storing.openai.batches.list(limit=2)]

    assert sorted(listed) == sorted(batch.id for batch in made)
    for batch in made:
        await ended(storing, batch)


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        (
            "/v1/completions",
            {"prompt": "one two"},
            lambda body: body["choices"][0]["text"] == "one two",
        ),
        (
            "/v1/responses",
            {"input": "one two"},
            lambda body: body["output"][0]["content"][0]["text"] == "one two",
        ),
        (
            "/v1/embeddings",
            {"input": "one two"},
            lambda body: body["data"][0]["embedding"] == [1.0, 0.0, 0.0, 0.0],
        ),
    ],
)
async def test_every_endpoint_has_batches(
    storing: LiveGateway, endpoint: str, body: dict[str, Any], answer: Any
) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": endpoint,
        "body": {"model": MODEL, **body},
    }

    batch = await ended(storing, await order(storing, [line], endpoint=endpoint))

    (answered,) = await output(storing, batch.output_file_id)
    assert answer(answered["response"]["body"])
    assert used(batch) == used_in([answered])
    assert used(batch).num_input_tokens > 0
    assert batch.model == MODEL


@pytest.mark.parametrize("parsers", [{"reasoning_parser": "qwen3"}])
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}]}),
        ("/v1/responses", {"input": "one two"}),
    ],
)
async def test_the_usage_of_a_batch_is_the_sum_over_its_output_file(
    storing: LiveGateway, worker: ScriptedWorker, endpoint: str, body: dict[str, Any]
) -> None:
    async def think(job: ScriptedJob) -> None:
        await job.start()
        await job.say("<think>what")
        finished = job.log.finish(0, [1, 2], "</think>this", "stop")
        await job.publish(structs.replace(finished, num_cached_tokens=16))

    worker.script = think
    lines = [
        {"custom_id": str(k), "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        for k in range(3)
    ]

    batch = await ended(storing, await order(storing, lines, endpoint=endpoint))

    answers = await output(storing, batch.output_file_id)
    assert used(batch) == used_in(answers)
    assert 0 not in used(batch)


async def test_each_bad_line_is_named(storing: LiveGateway, worker: ScriptedWorker) -> None:
    lines = [
        chat("good"),
        "not JSON",
        '{"method": "POST", "url": "/v1/chat/completions", "body": {}}',
        chat("good"),
        {**chat("url"), "url": "/v1/completions"},
        chat("parameter", temperature=9),
        chat("stream", stream=True),
        chat("model", model="unknown"),
        {**chat("method"), "method": "GET"},
        chat("schema", response_format={"type": "json_schema"}),
    ]

    batch = await ended(storing, await order(storing, lines))

    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert ending_times(batch) == {"failed_at"}
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "invalid_line", "custom_id"),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "mismatched_url", "url"),
        (6, "invalid_request", "body.temperature"),
        (7, "invalid_request", "body.stream"),
        (8, "model_not_found", "body.model"),
        (9, "invalid_line", "method"),
        (10, "invalid_request", "body.response_format.json_schema"),
    ]
    assert worker.jobs == []


@pytest.mark.parametrize(("lines", "code"), [([], "empty_file"), ([" "], "empty_file")])
async def test_a_file_needs_requests(storing: LiveGateway, lines: list[str], code: str) -> None:
    batch = await ended(storing, await order(storing, lines))

    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == [code]


async def test_a_batch_that_fails_is_claimed_by_nobody_else(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        await ended(gateway, await order(gateway, []))

    assert "batch claimed by another gateway" not in caplog.text


async def test_the_log_says_how_a_batch_ended(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.batches.batch_runner")

    def facts(message: str, name: str) -> set[object]:
        return {vars(found)[name] for found in caplog.records if found.msg == message}

    async def have_ended() -> bool:
        return facts("batch ended", "status") == {"completed", "failed"}

    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        await order(gateway, [chat("a")])
        await order(gateway, ["not JSON"] * 3)
        await eventually(have_ended)

    assert facts("input of a batch is not valid", "num_errors") == {3}


async def test_lines_are_limited(bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 2 * 4096, "max_body_bytes": 1000, "data_dir": tmp_path}
    async with live_gateway(bus, **limits) as gateway:
        batch = await order(gateway, [chat("a" * 900), chat("b"), chat("c")])
        batch = await ended(gateway, batch)

    assert batch.errors is not None
    errors = [(error.line, error.code) for error in batch.errors.data or ()]
    assert errors == [(1, "line_too_long"), (3, "too_many_requests")]


async def test_a_line_that_fails_is_in_the_error_file(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    async def fail_one(job: ScriptedJob) -> None:
        if job.job.sampling.max_tokens == 1:
            await job.start()
            return await job.fail("context_length_exceeded", "Too long.", "messages")
        return await repeat_the_prompt(job)

    worker.script = fail_one

    batch = await ended(storing, await order(storing, [chat("bad", max_tokens=1), chat("good")]))

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    assert set(texts(await output(storing, batch.output_file_id))) == {"good"}
    (failed,) = await output(storing, batch.error_file_id)
    assert failed["custom_id"] == "bad"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_cancelled_batch_stops_at_once_and_keeps_what_is_done(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    async def finish_one(job: ScriptedJob) -> None:
        await (repeat_the_prompt if job.job.sampling.max_tokens == 1 else start_only)(job)

    worker.script = finish_one
    lines = [chat("done", max_tokens=1), chat("running"), "", chat("other")]
    batch = await order(storing, lines)
    await until(
        storing, batch, lambda now: bool(now.request_counts and now.request_counts.completed)
    )
    await worker.wait_until(lambda: worker.num_running == 2)

    cancelled = await storing.openai.batches.cancel(batch.id)
    await worker.wait_until(lambda: worker.num_running == 0)
    batch = await ended(storing, batch)

    assert cancelled.status == "cancelling"
    assert ending_times(cancelled) == {"cancelling_at"}
    assert batch.status == "cancelled"
    assert ending_times(batch) == {"cancelling_at", "cancelled_at"}
    assert 'outcome="internal_error"' not in (await storing.http.get("/metrics")).text
    assert sum(isinstance(command, Cancel) for command in worker.commands) == 2
    assert texts(await output(storing, batch.output_file_id)) == {"done": "one"}
    errors = await output(storing, batch.error_file_id)
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
        ("running", "batch_cancelled"),
        ("other", "batch_cancelled"),
    ]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        await storing.openai.batches.cancel((await ended(storing, await order(storing, []))).id)


async def test_a_batch_that_expires_keeps_what_is_done(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    async def finish_one(job: ScriptedJob) -> None:
        await (repeat_the_prompt if job.job.sampling.max_tokens == 1 else start_only)(job)

    worker.script = finish_one
    lines = [chat("done", max_tokens=1), chat("late")]

    batch = await until(storing, await order(storing, lines, window="60s"), has_answers)
    skip(60)
    batch = await ended(storing, batch)

    assert batch.status == "expired"
    assert ending_times(batch) == {"expired_at"}
    assert texts(await output(storing, batch.output_file_id)) == {"done": "one"}
    (late,) = await output(storing, batch.error_file_id)
    assert (late["custom_id"], late["response"]) == ("late", None)
    assert late["error"]["code"] == "batch_expired"
    await worker.wait_until(lambda: worker.num_running == 0)


async def test_only_a_window_of_lines_is_in_the_queue(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    async with live_gateway(bus, data_dir=tmp_path, max_batch_window=4) as gateway:
        batch = await ended(gateway, await order(gateway, [chat(str(k)) for k in range(40)]))

    assert batch.status == "completed"
    assert worker.most_running <= 4


async def test_long_answers_start_first_and_the_output_keeps_the_order_of_the_file(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    lines = [chat(str(k), max_tokens=length) for k, length in enumerate((10, 1, 2000, 100))]
    async with live_gateway(bus, data_dir=tmp_path, max_batch_window=1) as gateway:
        batch = await ended(gateway, await order(gateway, lines))
        answers = await output(gateway, batch.output_file_id)

    assert [one.job.sampling.max_tokens for one in worker.jobs] == [2000, 100, 10, 1]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2", "3"]


async def test_a_line_is_tried_again_after_an_error_that_passes(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    is_first = True

    async def be_busy_once(job: ScriptedJob) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            await job.start()
            return await job.fail("rate_limit_exceeded", "Later.")
        return await repeat_the_prompt(job)

    worker.script = be_busy_once

    batch = await ended(storing, await order(storing, [chat("a")]))

    assert texts(await output(storing, batch.output_file_id)) == {"a": "one two three"}


async def test_a_line_that_is_too_large_for_its_worker_is_not_tried_again(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    async def lack_memory(job: ScriptedJob) -> None:
        await job.start()
        await job.fail("out_of_memory", "Too little.")

    worker.script = lack_memory

    batch = await ended(storing, await order(storing, [chat("a")]))

    (line,) = await output(storing, batch.error_file_id)
    assert line["response"]["status_code"] == 503
    assert line["response"]["body"]["error"]["code"] == "out_of_memory"
    assert len(worker.jobs) == 1


async def test_an_embedding_waits_for_one_of_all_batches_at_most(
    storing: LiveGateway, worker: ScriptedWorker
) -> None:
    num_asked = 0

    def answer_none_of_batches(job: Any) -> Any:
        nonlocal num_asked
        is_of_batch = isinstance(job, EmbeddingJob) and job.request_id.startswith("embd-")
        num_asked += is_of_batch
        return None if is_of_batch else count_words(job)

    worker.quick_script = answer_none_of_batches
    lines = [
        {"custom_id": str(k), "url": "/v1/embeddings", "body": {"model": MODEL, "input": "a"}}
        for k in range(5)
    ]
    batches = [await order(storing, lines, endpoint="/v1/embeddings") for _ in range(2)]
    for batch in batches:
        await until(storing, batch, lambda now: now.status == "in_progress")

    async def has_asked() -> bool:
        return num_asked > 0

    await eventually(has_asked)
    single = await storing.post("/v1/embeddings", model=MODEL, input="b")

    assert single.status_code == 200
    assert num_asked == 1
    for batch in batches:
        await storing.openai.batches.cancel(batch.id)
        await ended(storing, batch)


async def test_an_idempotency_key_makes_one_batch(storing: LiveGateway) -> None:
    file = await storing.openai.files.create(file=("f", jsonl([chat("a")])), purpose="batch")

    async def post(window: str) -> httpx.Response:
        body = {
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
        }
        headers = {"Idempotency-Key": "key"}
        return await storing.http.post("/v1/batches", json=body, headers=headers)

    first, second, other = await post("24h"), await post("24h"), await post("1h")

    assert first.json()["id"] == second.json()["id"]
    assert other.status_code == 422


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_a_wrong_parameter_is_named(
    storing: LiveGateway, more: dict[str, Any], param: str
) -> None:
    body = {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **more,
    }

    refused = await storing.post("/v1/batches", **body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_an_unknown_file_is_not_found(storing: LiveGateway) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/responses", "completion_window": "24h"}

    refused = await storing.post("/v1/batches", **body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")


async def test_another_gateway_continues_a_batch(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    """The lines that are running when a gateway leaves go on, and are not computed again."""
    may_finish = asyncio.Event()

    async def wait_and_repeat(job: ScriptedJob) -> None:
        await job.start()
        await job.say("first ")
        await may_finish.wait()
        await job.finish(job.job.request_id)

    worker.script = wait_and_repeat
    options = {"data_dir": tmp_path, "max_batch_window": 4}
    lines = [chat(str(k)) for k in range(8)]
    async with MemoryBus(broker) as one, MemoryBus(broker) as other:
        async with live_gateway(one, **options) as first:
            batch = await order(first, lines)
            await worker.wait_until(lambda: worker.num_running == 4)
        async with live_gateway(other, **options) as second:
            may_finish.set()
            batch = await ended(second, batch)
            answers = await output(second, batch.output_file_id)

    assert batch.status == "completed"
    assert [answer["custom_id"] for answer in answers] == [str(k) for k in range(8)]
    assert len(set(texts(answers).values())) == 8
    assert len(worker.jobs) == 8


async def test_a_batch_without_the_bytes_of_its_file_fails(
    storing: LiveGateway, tmp_path: Path
) -> None:
    client = storing.openai
    file = await client.files.create(file=("in.jsonl", jsonl([chat("a")])), purpose="batch")
    (tmp_path / "files" / file.id).unlink()

    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(storing, batch)

    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.code, error.param) == ("missing_file", "input_file_id")
    assert file.id in (error.message or "")


async def test_a_batch_ends_with_its_answers_if_its_file_is_lost_meanwhile(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    async def finish_one(job: ScriptedJob) -> None:
        await (repeat_the_prompt if job.job.sampling.max_tokens == 1 else start_only)(job)

    worker.script = finish_one
    async with MemoryBus(broker) as one, MemoryBus(broker) as other:
        async with live_gateway(one, data_dir=tmp_path) as first:
            batch = await order(first, [chat("done", max_tokens=1), chat("running")])
            batch = await until(first, batch, has_answers)
        (tmp_path / "files" / batch.input_file_id).unlink()
        async with live_gateway(other, data_dir=tmp_path) as second:
            batch = await ended(second, batch)
            answers = await output(second, batch.output_file_id)
            await second.openai.files.delete(batch.input_file_id)

    assert batch.status == "expired"
    assert texts(answers) == {"done": "one"}


async def test_a_checked_batch_ends_under_a_lower_limit_of_its_lines(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    may_finish = wait_before_the_end(worker)
    async with MemoryBus(broker) as one, MemoryBus(broker) as other:
        async with live_gateway(one, data_dir=tmp_path) as first:
            batch = await order(first, [chat("a" * 400), chat("b" * 400)])
            await worker.wait_until(lambda: worker.num_running == 2)
        async with live_gateway(other, data_dir=tmp_path, max_body_bytes=300) as second:
            may_finish.set()
            batch = await ended(second, batch)

    assert batch.status == "completed"


async def test_any_gateway_cancels_a_batch(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    async with two_gateways(broker, data_dir=tmp_path) as (first, second):
        batch = await order(first, [chat("a")])
        await worker.wait_until(lambda: worker.num_running == 1)

        await second.openai.batches.cancel(batch.id)
        await worker.wait_until(lambda: worker.num_running == 0)
        batch = await ended(second, batch)

    assert batch.status == "cancelled"


async def test_only_the_first_cancellation_is_published_to_all_gateways(
    bus: MemoryBus, tmp_path: Path
) -> None:
    heard = Queue("heard", (topology.ALL_GATEWAYS,))
    await bus.declare(heard)
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    state = await store.open()
    async with state.files.writing("", "in.jsonl", "batch") as draft:
        pass
    batch = await state.batches.create("", Order("/v1/chat/completions", draft.id, "24h", 86400))
    await state.batches.claim({}, 60)  # by a gateway that is gone
    await store.close()

    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        for _ in range(3):
            cancelled = await gateway.openai.batches.cancel(batch.id)
            assert cancelled.status == "cancelling"

    state_of_queue = await bus.inspect(heard.name)
    assert state_of_queue is not None
    assert state_of_queue.num_ready == 1


async def test_another_tenant_cannot_cancel_a_batch(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    keys = KeyFile(tmp_path / "keys")
    secrets = [keys.add(tenant) for tenant in ("a", "b")]
    async with live_gateway(bus, data_dir=tmp_path, keys_file=keys.path) as gateway:
        a, b = (
            replace(gateway, openai=gateway.openai.with_options(api_key=secret))
            for secret in secrets
        )
        batch = await until(a, await order(a, [chat("a")]), lambda now: now.status == "in_progress")

        with pytest.raises(openai.NotFoundError, match=batch.id):
            await b.openai.batches.cancel(batch.id)

        assert await a.openai.batches.retrieve(batch.id) == batch
        assert not any(isinstance(command, Cancel) for command in worker.commands)


_TWICE = (
    json.dumps(chat("model", "x")).replace('"model":', '"model": null, "model":'),
    json.dumps(chat("body", "x")).replace('"body":', '"body": 5, "body":'),
)
"""Lines in which a name occurs twice, the first time with a value that is not valid."""


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_ends_if_a_name_occurs_twice_in_a_line(
    storing: LiveGateway, worker: ScriptedWorker, is_cancelled: bool
) -> None:
    worker.script = start_only if is_cancelled else repeat_the_prompt

    batch = await order(storing, _TWICE)
    if is_cancelled:
        await worker.wait_until(lambda: worker.num_running == 2)
        await storing.openai.batches.cancel(batch.id)
    batch = await ended(storing, batch)

    if is_cancelled:
        errors = await output(storing, batch.error_file_id)
        assert [line["custom_id"] for line in errors] == ["model", "body"]
    else:
        assert texts(await output(storing, batch.output_file_id)) == {"model": "x", "body": "x"}
    assert batch.status == ("cancelled" if is_cancelled else "completed")
    await storing.openai.files.delete(batch.input_file_id)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_line_that_cannot_be_read_after_the_check_does_not_hold_up_its_batch(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path, is_cancelled: bool
) -> None:
    may_finish = asyncio.Event()

    async def wait_and_repeat(job: ScriptedJob) -> None:
        await may_finish.wait()
        await repeat_the_prompt(job)

    worker.script = wait_and_repeat
    async with MemoryBus(broker) as one, MemoryBus(broker) as other:
        async with live_gateway(one, data_dir=tmp_path) as first:
            batch = await order(first, [chat("bad"), chat("good")])
            await worker.wait_until(lambda: worker.num_running == 2)
        (tmp_path / "files" / batch.input_file_id).write_bytes(jsonl(["not JSON", chat("good")]))
        if is_cancelled:
            store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
            await (await store.open()).batches.cancel("", batch.id)
            await store.close()
        else:
            may_finish.set()
        async with live_gateway(other, data_dir=tmp_path) as second:
            batch = await ended(second, batch)
            errors = await output(second, batch.error_file_id)

    if is_cancelled:
        assert batch.status == "cancelled"
        assert [line["custom_id"] for line in errors] == ["", "good"]
    else:
        assert batch.status == "completed"
        assert [line["response"]["status_code"] for line in errors] == [500]


async def test_a_cancelled_batch_stops_the_jobs_of_a_gateway_that_is_gone(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    async with MemoryBus(broker) as one, MemoryBus(broker) as other:
        async with live_gateway(one, data_dir=tmp_path) as first:
            batch = await order(first, [chat("a"), chat("b")])
            await worker.wait_until(lambda: worker.num_running == 2)
        store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
        await (await store.open()).batches.cancel("", batch.id)
        await store.close()
        async with live_gateway(other, data_dir=tmp_path) as second:
            await worker.wait_until(lambda: worker.num_running == 0)
            batch = await ended(second, batch)

    assert batch.status == "cancelled"
    assert sum(isinstance(command, Cancel) for command in worker.commands) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}]}),
        ("/v1/completions", {"prompt": "one two"}),
        ("/v1/responses", {"input": "one two"}),
    ],
)
async def test_flex_requests_are_in_the_batch_class(
    storing: LiveGateway, worker: ScriptedWorker, path: str, body: dict[str, Any], stream: bool
) -> None:
    named = [{"service_tier": "flex"}, {"service_tier": "auto"}, {}]

    answers = [
        await storing.post(path, model=MODEL, stream=stream, **body, **tier) for tier in named
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [job.lane for job in worker.jobs] == ["batch", "interactive", "interactive"]
    has_tier = path != "/v1/completions"
    assert [tiers(answer) for answer in answers] == [
        {"flex" if has_tier else None},
        {"default" if has_tier else None},
        {None},
    ]


def tiers(answer: httpx.Response) -> set[str | None]:
    """The tiers that an answer names, or the parts of a stream that can name a tier."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {answer.json().get("service_tier")}
    data = [item for item in events(answer.text) if isinstance(item, dict)]
    wholes = [item.get("response", item) for item in data]
    return {whole.get("service_tier") for whole in wholes if "object" in whole}
