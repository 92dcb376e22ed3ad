"""What the limits of an API key mean for the lines of its batches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import EmbeddingJob
from tests.support.gateway.batches import chat, ended, jsonl, order, output, texts, until
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    count_words,
    wait_before_the_end,
)

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


@asynccontextmanager
async def with_key(
    bus: MemoryBus, file: KeyFile, secret: str, **options: Any
) -> AsyncIterator[LiveGateway]:
    """A gateway whose client of OpenAI has this API key."""
    options = {"keys_file": file.path, "data_dir": file.path.parent, **options}
    async with live_gateway(bus, **options) as gateway:
        yield replace(gateway, openai=gateway.openai.with_options(api_key=secret))


def embedding(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": MODEL, "input": text}
    return {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": body}


async def test_a_line_that_the_key_never_permits_fails_the_batch(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    secret = file.add("alice", models=(MODEL,), max_tokens=50, tokens_per_minute=100)
    lines = [
        chat("good", max_tokens=50),
        chat("model", model="other"),
        chat("answer", max_tokens=51),
        chat("prompt", "a" * 400),
    ]
    async with with_key(bus, file, secret) as gateway:
        batch = await ended(gateway, await order(gateway, lines))

    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data or ()] == [
        (2, "model_not_found", "body.model"),
        (3, "invalid_request", "body.max_tokens"),
        (4, "invalid_request", "body.max_tokens"),
    ]
    assert worker.jobs == []


async def test_an_embedding_that_the_key_never_permits_fails_the_batch(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    secret = file.add("alice", tokens_per_minute=100)
    async with with_key(bus, file, secret) as gateway:
        batch = await order(gateway, [embedding("large", "a" * 401)], endpoint=EMBEDDINGS)
        batch = await ended(gateway, batch)

    assert batch.errors is not None
    assert [error.line for error in batch.errors.data or ()] == [1]


async def test_lines_count_as_requests_of_the_key_and_wait(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    secret = file.add("alice", requests_per_minute=2)
    async with with_key(bus, file, secret) as gateway:
        batch = await order(gateway, [chat(str(k)) for k in range(3)])
        await until(
            gateway, batch, lambda now: bool(now.request_counts and now.request_counts.completed)
        )
        await worker.wait_until(lambda: len(worker.jobs) == 2)
        headers = {"authorization": f"Bearer {secret}"}
        single = await gateway.http.post(
            "/v1/chat/completions", json=chat("single")["body"], headers=headers
        )
        two = await until(
            gateway,
            batch,
            lambda now: bool(now.request_counts and now.request_counts.completed == 2),
        )
        await gateway.openai.batches.cancel(batch.id)
        batch = await ended(gateway, batch)
        errors = await output(gateway, batch.error_file_id)

    assert single.status_code == 429
    assert (two.status, batch.request_counts and batch.request_counts.failed) == ("in_progress", 0)
    assert [error["error"]["code"] for error in errors] == ["batch_cancelled"]
    assert len(worker.jobs) == 2


async def test_lines_wait_for_the_keys_concurrent_requests(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    secret = file.add("alice", max_concurrent=2)
    async with with_key(bus, file, secret) as gateway:
        batch = await ended(gateway, await order(gateway, [chat(str(k)) for k in range(4)]))

    assert batch.status == "completed"
    assert 0 < worker.most_running <= 2


async def test_tokens_that_a_line_does_not_use_are_returned(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    """Each line is estimated at more than half of the limit, and has six tokens."""
    secret = file.add("alice", tokens_per_minute=150)
    async with with_key(bus, file, secret) as gateway:
        lines = [chat(str(k), max_tokens=100) for k in range(4)]
        batch = await ended(gateway, await order(gateway, lines))

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 4


async def test_embeddings_wait_for_the_keys_tokens(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    jobs: list[EmbeddingJob] = []

    def answer(job: Any) -> Any:
        if isinstance(job, EmbeddingJob):
            jobs.append(job)
        return count_words(job)

    worker.quick_script = answer
    secret = file.add("alice", requests_per_minute=1)
    async with with_key(bus, file, secret) as gateway:
        lines = [embedding("a", "one two"), embedding("b", "three")]
        batch = await order(gateway, lines, endpoint=EMBEDDINGS)
        await until(
            gateway, batch, lambda now: bool(now.request_counts and now.request_counts.completed)
        )
        await gateway.openai.batches.cancel(batch.id)
        batch = await ended(gateway, batch)

    assert [job.key_id for job in jobs] == [secret.split("-")[1]]
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


async def test_a_line_without_max_tokens_has_the_keys(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    secret = file.add("alice", max_tokens=2)
    async with with_key(bus, file, secret) as gateway:
        await ended(gateway, await order(gateway, [chat("a")]))

    (job,) = worker.jobs
    assert job.job.sampling.max_tokens == 2
    assert job.job.key_id == secret.split("-")[1]


async def test_a_gateway_that_continues_a_batch_reads_what_another_was_admitted_for(
    broker: MemoryBroker, worker: ScriptedWorker, file: KeyFile
) -> None:
    """The limit is used up by the lines that run, which do not wait for it again."""
    may_finish = asyncio.Event()

    async def wait_and_repeat(job: ScriptedJob) -> None:
        await job.start()
        await may_finish.wait()
        await job.finish(job.job.request_id)

    worker.script = wait_and_repeat
    secret = file.add("alice", requests_per_minute=4)
    async with (
        MemoryBus(broker) as one,
        MemoryBus(broker) as other,
        with_key(other, file, secret) as second,
    ):
        async with with_key(one, file, secret) as first:
            batch = await order(first, [chat(str(k)) for k in range(4)])
            await worker.wait_until(lambda: worker.num_running == 4)
        may_finish.set()
        batch = await ended(second, batch)
        answers = await output(second, batch.output_file_id)

    assert len(texts(answers)) == len(worker.jobs) == 4


async def test_answers_end_where_the_tenants_files_have_no_room(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    lines = [chat(str(number)) for number in range(10)]
    room = 1500
    max_bytes = len(jsonl(lines)) + room
    limits = {"max_tenant_bytes": max_bytes, "max_batch_window": 1, "data_dir": tmp_path}
    async with live_gateway(bus, batch_room_s=0.0, **limits) as gateway:
        batch = await ended(gateway, await order(gateway, lines))
        answers = await output(gateway, batch.output_file_id)
        errors = await output(gateway, batch.error_file_id)
        assert batch.output_file_id is not None
        written = await gateway.openai.files.retrieve(batch.output_file_id)

    assert batch.status == "completed"
    assert len(answers) + len(errors) == len(lines)
    assert written.bytes <= room + written.bytes // len(answers)
    assert len(worker.jobs) == len(answers) > 0
    assert {error["response"]["status_code"] for error in errors} == {400}
    messages = {error["response"]["body"]["error"]["message"] for error in errors}
    assert messages == {"The tenant's files exceed their total size limit."}


async def test_a_repeated_line_that_new_limits_never_permit_has_an_error_of_its_own(
    bus: MemoryBus, worker: ScriptedWorker, file: KeyFile
) -> None:
    may_end = wait_before_the_end(worker)
    secret = file.add("alice", tokens_per_minute=1000)
    headers = {"authorization": f"Bearer {secret}"}
    equal: dict[str, Any] = {"content": "a b", "max_tokens": 50, "temperature": 0}
    options = {"keys_look_s": 0.0, "batch_lease_s": 3600.0}
    async with with_key(bus, file, secret, **options) as gateway:
        await hears_a_worker(gateway, headers)
        ordered = await order(gateway, [chat("first", **equal), chat("second", **equal)])
        await worker.wait_until(lambda: len(worker.jobs) == 1)
        text = file.path.read_text().replace("tokens_per_minute=1000", "tokens_per_minute=20")
        file.path.write_text(text)
        may_end.set()
        batch = await ended(gateway, ordered)
        (error,) = await output(gateway, batch.error_file_id)

    assert len(worker.jobs) == 1
    assert (error["custom_id"], error["response"]["status_code"]) == ("second", 400)
