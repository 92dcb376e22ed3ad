"""The child process of a worker is killed, hangs, starts slowly, or comes back with another
model."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shared.bus.memory import MemoryBus
from shared.messages import Finished, GenerationJob, SamplingParams, Started
from tests.support.deployment.processes import free_port
from tests.support.engines import scripted_server
from tests.support.engines.listener import Listener
from tests.support.engines.scripted_server import EngineFiles, engine_server
from tests.support.workers.jobs import Log, ask, new_job, publish, read, reading
from tests.support.workers.synthetic import real_worker, remote_worker
from worker.engines import child, http_engine, server
from worker.engines.start_up import EngineOptions, open_engine
from worker.text import Tokenizer

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def _with_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(child, "_FIRST_PAUSE_S", 0.05)


@pytest.fixture
def files(tmp_path: Path) -> EngineFiles:
    return EngineFiles(tmp_path)


@pytest.fixture
def options(files: EngineFiles, smollm2: Path) -> dict[str, str]:
    """The options of a worker that starts the engine."""
    port = free_port()
    return {
        "model": str(smollm2),
        "served_name": "smollm2",
        "engine": "llama-server",
        "engine_url": f"http://127.0.0.1:{port}",
        "engine_command": files.command(smollm2, port),
    }


@pytest.fixture
def whole(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of an undisturbed answer."""

    async def undisturbed() -> Log:
        async with MemoryBus() as bus, remote_worker(bus, script):
            return await ask(bus, new_answer())

    with engine_server("llama-server", tokenizer) as script:
        yield asyncio.run(undisturbed()).token_ids


def new_answer() -> GenerationJob:
    return new_job("smollm2", sampling=SAMPLING)


def engine_process() -> psutil.Process:
    """The server that this process has started."""
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if scripted_server.__name__ in process.cmdline() and "guard" not in process.cmdline()[2]
    ]
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


def num_runs(log: Log) -> int:
    return sum(isinstance(event, Started) for event in log.raw)


async def test_a_child_that_is_killed_for_its_memory_is_started_again_and_the_answer_goes_on(
    files: EngineFiles, options: dict[str, str], whole: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    files.pause.touch()
    job = new_answer()
    async with MemoryBus() as bus, real_worker(bus, **options), reading(bus, job) as consumer:
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=4)
        engine_process().kill()
        files.pause.unlink()  # for the next process: this one must not end the answer before
        log = await read(bus, job, consumer, log)

    # Once, although it starts for longer than a child that has answered may be silent.
    (ended,) = [one for one in caplog.records if one.message == "engine process ended"]
    assert vars(ended)["status"] == 128 + signal.SIGKILL
    assert log.token_ids == whole
    assert num_runs(log) >= 2  # the worker may take it again before it knows of the death


async def test_the_answer_of_an_engine_that_hangs_goes_on_at_another_worker(
    files: EngineFiles,
    options: dict[str, str],
    whole: list[int],
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files.pause.touch()
    job = new_answer()
    async with MemoryBus() as bus, real_worker(bus, **options), reading(bus, job) as consumer:
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=4)
        process = engine_process()
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as with_haste:  # no other engine answers as soon as that
            with_haste.setattr(server, "_HEALTH_S", 0.1)
            await asyncio.to_thread(wait_until, lambda: "engine is away" in caplog.messages)
        with engine_server("llama-server", tokenizer) as script:
            async with remote_worker(bus, script):
                log = await read(bus, job, consumer, log)
        with suppress(psutil.NoSuchProcess):  # a child that is silent for long is replaced
            process.send_signal(signal.SIGCONT)

    assert (log.token_ids, num_runs(log)) == (whole, 2)


@pytest.mark.parametrize(
    ("signum", "kinds"),
    [(signal.SIGKILL, {"ended", "away"}), (signal.SIGSTOP, {"ended", "away", "hung"})],
)
def test_a_child_that_ends_or_hangs_is_replaced_and_counted(
    signum: signal.Signals,
    kinds: set[str],
    options: dict[str, str],
    smollm2: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_engine, "_MAX_MISSED_AS_CHILD", 4)
    url, command = options["engine_url"], options["engine_command"]
    opened = open_engine(EngineOptions(engine="llama-server", url=url, command=command), smollm2)
    listener = Listener()
    opened.engine.start(listener)
    hung = engine_process()
    with monkeypatch.context() as with_haste:
        with_haste.setattr(server, "_HEALTH_S", 0.1)
        hung.send_signal(signum)
        is_away = not listener.ready.get(timeout=PATIENCE_S)
    is_back = listener.ready.get(timeout=PATIENCE_S)
    failures = opened.engine.load().num_failures
    opened.engine.stop()

    assert (is_away, is_back, failures) == (True, True, dict.fromkeys(kinds, 1))
    assert caplog.messages.count("engine process ended") == 1
    assert caplog.messages.count("engine hangs, and is started again") == ("hung" in kinds)


async def test_a_worker_waits_for_an_engine_that_starts_slowly(
    files: EngineFiles, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files.ready.unlink()

    def become_ready() -> None:
        wait_until(lambda: "waiting for the engine" in caplog.messages)
        files.ready.touch()

    starting = threading.Thread(target=become_ready)
    starting.start()
    async with MemoryBus() as bus, real_worker(bus, **options):
        log = await ask(bus, new_answer())
    starting.join()

    assert isinstance(log.last, Finished)


async def test_a_child_that_comes_back_with_another_model_is_not_used(
    files: EngineFiles, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryBus() as bus, real_worker(bus, **options):
        files.model.write_text("another")
        engine_process().kill()
        await asyncio.to_thread(
            wait_until, lambda: "engine answers, and is not used" in caplog.messages
        )

    (refused, *_) = [one for one in caplog.records if one.message.startswith("engine answers")]
    assert "model='model 1 1'" in vars(refused)["reason"]
    assert "model='another 1 1'" in vars(refused)["reason"]
