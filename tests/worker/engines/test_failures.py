"""An engine's server fails in the middle of a job: nothing is lost, repeated or changed."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.errors import StartupError
from shared.messages import (
    Cancel,
    Failed,
    Finished,
    SamplingParams,
    Started,
    TokenPrompt,
    encode,
)
from shared.settings import WorkerSettings
from tests.support.engines.scripted_server import ScriptedEngine, engine_server
from tests.support.workers.jobs import Log, ask, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import remote_worker
from worker.decode import served_model
from worker.engines import http_engine
from worker.text import Tokenizer

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PATIENCE_S = 240.0


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedEngine]:
    with engine_server("llama-server", tokenizer) as server:
        yield server


@pytest.fixture(autouse=True)
def _with_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_LOOK_INTERVAL_S", 0.05)


def job_of(**fields: Any) -> Any:
    return new_job("smollm2", sampling=SAMPLING, **fields)


async def ask_when_it_ends(server: ScriptedEngine, bus: MemoryBus) -> Log:
    """Ask while the engine ends, and does not come back."""
    server.ends_after, server.faults = 3, ["break"]
    return await ask(bus, job_of())


def num_runs(log: Log) -> int:
    return sum(isinstance(event, Started) for event in log.raw)


async def said(caplog: pytest.LogCaptureFixture, message: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while message not in caplog.messages:  # noqa: ASYNC110 (a log tells nobody)
            await asyncio.sleep(0.01)


async def test_a_busy_engine_is_asked_again(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryBus() as bus, remote_worker(bus, server):
        server.faults = ["429", "429"]
        log = await ask(bus, job_of())

    assert (len(log.token_ids), num_runs(log), len(server.bodies)) == (24, 1, 3)


async def test_what_the_engine_refuses_fails(server: ScriptedEngine) -> None:
    async with MemoryBus() as bus, remote_worker(bus, server):
        server.faults = ["400"]
        log = await ask(bus, job_of())

    assert isinstance(log.last, Failed)
    assert (log.last.code, "told to" in log.last.message) == ("invalid_request", True)


async def test_a_request_that_ends_its_engine_is_dead_lettered(server: ScriptedEngine) -> None:
    server.deadly_token = 1234
    deadly = new_job("smollm2", TokenPrompt(token_ids=(1234,)), sampling=SAMPLING)
    async with MemoryBus() as bus, remote_worker(bus, server):
        server.broken_after = 0
        log = await ask(bus, deadly)
        dead = await num_ready(bus, topology.DEAD_LETTERS.name)
        other = await ask(bus, job_of())

    assert isinstance(log.last, Failed)
    assert (log.last.code, dead, len(server.bodies)) == ("worker_lost", 1, 4)
    assert isinstance(other.last, Finished)


async def test_jobs_go_on_when_the_engine_is_back(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with MemoryBus() as bus, remote_worker(bus, server):
        whole = await ask(bus, job_of())
        asking = asyncio.create_task(ask_when_it_ends(server, bus))
        await said(caplog, "no jobs are taken while the engine is away")
        server.is_healthy = True
        log = await asking

    assert log.token_ids == whole.token_ids
    assert "engine is back" in caplog.messages


async def test_an_engine_with_another_model_is_not_used(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryBus() as bus, remote_worker(bus, server):
        asking = asyncio.create_task(ask_when_it_ends(server, bus))
        await said(caplog, "no jobs are taken while the engine is away")
        server.model, server.is_healthy = "another", True
        await said(caplog, "engine answers, and is not used")
        assert not asking.done()
        server.model = "model"
        log = await asking

    assert isinstance(log.last, Finished)


async def test_an_engine_that_comes_back_at_once_with_another_model_continues_no_answer(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryBus() as bus, remote_worker(bus, server):
        whole = await ask(bus, job_of())
        server.model, server.faults = "another", ["break"]
        asking = asyncio.create_task(ask(bus, job_of()))
        await said(caplog, "no jobs are taken while the engine is away")
        num_asked = len(server.bodies)
        server.model = "model"
        log = await asking

    assert (num_asked, log.token_ids) == (2, whole.token_ids)
    assert "engine answers, and is not used" in caplog.messages


async def test_nonsense_about_tokens_keeps_an_engine_away_until_it_makes_sense(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryBus() as bus, remote_worker(bus, server):
        server.can_tokenize, server.faults = False, ["break"]
        asking = asyncio.create_task(ask(bus, job_of()))
        await said(caplog, "engine answers, and is not used")
        server.can_tokenize = True
        log = await asking

    assert isinstance(log.last, Finished)


async def test_a_cancelled_job_closes_its_request(server: ScriptedEngine) -> None:
    server.paused_after = 4
    job = job_of()
    async with MemoryBus() as bus, remote_worker(bus, server), reading(bus, job) as consumer:
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=1)
        command = Message(encode(Cancel(request_id=job.request_id)))
        await bus.publish(topology.worker_binding(str(log.reader.worker)), command)
        log = await read(bus, job, consumer, log)
        is_closed = await asyncio.to_thread(server.num_closed.acquire, timeout=PATIENCE_S)

    assert isinstance(log.last, Failed)
    assert (log.last.code, is_closed) == ("cancelled", True)
    assert len(log.token_ids) <= 4


async def test_the_end_of_an_answer_closes_its_request(server: ScriptedEngine) -> None:
    server.paused_after = 10
    async with MemoryBus() as bus, remote_worker(bus, server):
        server.paused_after = None
        whole = await ask(bus, job_of())
        server.paused_after = 10
        sampling = SamplingParams(
            max_tokens=400, temperature=0.0, ignore_eos=True, stop=(whole.text[4:8],)
        )
        log = await ask(bus, new_job("smollm2", sampling=sampling))
        is_closed = await asyncio.to_thread(server.num_closed.acquire, timeout=PATIENCE_S)

    assert log.text == whole.text[: whole.text.index(whole.text[4:8])]
    assert is_closed


def test_another_vocabulary_stops_the_start(server: ScriptedEngine) -> None:
    server.vocab_shift = 1
    with pytest.raises(StartupError, match=r"is \[\d+.* there and \[\d+.* here"):
        served_model.load_for_worker(
            WorkerSettings(engine="llama-server", engine_url=server.url, model="smollm2")
        )


def test_a_context_that_the_engine_lacks_stops_the_start(server: ScriptedEngine) -> None:
    with pytest.raises(StartupError, match="1024, and the engine's context has 512"):
        served_model.load_for_worker(
            WorkerSettings(engine="llama-server", engine_url=server.url, max_seq_len=1024)
        )


def test_a_server_of_another_kind_stops_the_start(server: ScriptedEngine) -> None:
    with pytest.raises(StartupError, match="does not answer like vllm"):
        served_model.load_for_worker(
            WorkerSettings(engine="vllm", engine_url=f"{server.url}", engine_key="x")
        )


def test_a_server_without_its_kind_stops_the_start() -> None:
    with pytest.raises(StartupError, match="need --engine"):
        served_model.load_for_worker(WorkerSettings(engine_url="http://127.0.0.1:1"))
