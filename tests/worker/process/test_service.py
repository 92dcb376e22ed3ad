"""A whole worker on the in-memory bus, with a synthetic engine."""

import asyncio
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shared import messages, topology
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.bus.rabbit import RabbitBus
from shared.errors import StartupError
from shared.messages import (
    JSON,
    Cancel,
    ChatMessage,
    ChatPrompt,
    Completed,
    Drain,
    Failed,
    Finished,
    SamplingParams,
    Started,
    TextPrompt,
    TokenPrompt,
)
from shared.settings import Listener, WorkerSettings
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import free_port
from tests.support.engines.brake import Brake
from tests.support.metrics import total
from tests.support.workers.jobs import (
    Log,
    ask,
    ask_all,
    new_job,
    publish,
    read,
    reading,
    set_pace,
    wait_announced,
    wait_running,
)
from tests.support.workers.synthetic import echo_worker
from worker.decode.bridge import NUM_AT_ONCE
from worker.model import echo
from worker.process import service
from worker.process.health_server import HealthServer
from worker.text import Tokenizer

HELLO = ChatPrompt(messages=(ChatMessage(role="user", content="hello"),))
SECRET_ROLE = messages.encode(new_job("echo", HELLO)).replace(b"\xa4user", b"\xa6secret")
LONG = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)


def status_and_text(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def failure(log: Log) -> Failed:
    assert isinstance(log.last, Failed)
    return log.last


async def test_a_job_is_answered_with_a_log_that_ends() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        log = await ask(bus, new_job("echo", sampling=SamplingParams(max_tokens=8)))

    assert isinstance(log.raw[0], Started)
    assert isinstance(log.last, Finished)
    assert log.accepted == log.raw
    assert len(log.token_ids) == 8


async def test_the_text_is_that_of_the_tokens(tokenizer: Tokenizer) -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        log = await ask(bus, new_job("echo", sampling=SamplingParams(max_tokens=40)))

    stream = tokenizer.text_stream()
    assert log.text == "".join(map(stream.push, log.token_ids)) + stream.flush()


async def test_an_answer_does_not_depend_on_its_neighbours() -> None:
    jobs = [
        new_job("echo", TextPrompt(text=f"Prompt {k}"), sampling=SamplingParams(max_tokens=k + 1))
        for k in range(24)
    ]
    async with MemoryBus() as bus, echo_worker(bus, max_num_seqs=8, num_blocks=40):
        alone = [await ask(bus, job) for job in jobs]
        together = await ask_all(bus, jobs)

    assert [log.token_ids for log in together] == [log.token_ids for log in alone]


async def test_a_stream_may_ask_for_each_token_at_once() -> None:
    brake = Brake(num_steps=40)
    exact = SamplingParams(max_tokens=60, ignore_eos=True)
    paced = new_job("echo", sampling=exact)
    each = msgspec.structs.replace(new_job("echo", sampling=exact), each_token=True)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake, stream_events_per_s=0.001),
        reading(bus, each) as events_of_each,
        reading(bus, paced) as events_of_paced,
    ):
        await publish(bus, each)
        log_of_each = await read(bus, each, events_of_each, num_tokens=39)
        await publish(bus, paced)
        brake.release()
        await read(bus, each, events_of_each, log_of_each)
        log_of_paced = await read(bus, paced, events_of_paced)

    assert log_of_paced.token_ids == log_of_each.token_ids
    # One that says that it has started, those of the first tokens, and the last.
    assert len(log_of_paced.raw) <= 2 + NUM_AT_ONCE


async def test_final_mode_is_one_message_with_the_same_answer() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        streamed = await ask(bus, new_job("echo"))
        final = await ask(bus, new_job("echo", mode="final"))

    assert isinstance(final.last, Completed)
    assert len(final.raw) == 1
    (choice,) = final.last.choices
    assert (list(choice.token_ids), choice.text) == (streamed.token_ids, streamed.text)


async def test_a_json_job_is_answered_in_json() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        job = new_job("echo", mode="final")
        async with reading(bus, job) as consumer:
            await publish(bus, job, content_type=JSON)
            delivery = await anext(consumer)

    assert delivery.message.content_type == JSON
    assert delivery.message.correlation_id == job.request_id
    assert isinstance(messages.decode_event(delivery.message.body, JSON), Completed)


async def test_several_prompts_end_with_the_last_choice() -> None:
    prompts = [TextPrompt(text=text) for text in ("a", "b", "c")]
    async with MemoryBus() as bus, echo_worker(bus):
        log = await ask(bus, new_job("echo", *prompts))

    ends = [event for event in log.raw if isinstance(event, Finished)]
    assert sorted(event.choice for event in ends) == [0, 1, 2]
    assert log.last == ends[-1]


async def test_no_tokens_may_be_asked_for() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        log = await ask(bus, new_job("echo", sampling=SamplingParams(max_tokens=0)))

    assert isinstance(log.last, Finished)
    assert (log.last.finish_reason, log.token_ids, log.text) == ("length", [], "")


async def test_a_stop_string_ends_the_answer_before_it(tokenizer: Tokenizer) -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        whole = await ask(bus, new_job("echo", sampling=SamplingParams(max_tokens=40)))
        stop = whole.text[20:24]
        sampling = SamplingParams(max_tokens=40, stop=(stop,))
        log = await ask(bus, new_job("echo", sampling=sampling))

    assert isinstance(log.last, Finished)
    assert log.text == whole.text[: whole.text.index(stop)]
    assert (log.last.finish_reason, log.last.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("job", "code", "param"),
    [
        (new_job("echo", TokenPrompt(token_ids=(1 << 30,))), "invalid_request", "prompt"),
        (new_job("echo", TextPrompt(text="word " * 9000)), "context_length_exceeded", "prompt"),
        (
            new_job("echo", ChatPrompt(messages=(ChatMessage(role="user", content="a " * 9000),))),
            "context_length_exceeded",
            "messages",
        ),
        (
            new_job("echo", sampling=SamplingParams(max_tokens=9000)),
            "context_length_exceeded",
            "prompt",
        ),
        (new_job("echo", deadline=1.0), "deadline_exceeded", None),
    ],
    ids=["unknown token", "long text", "long chat", "long answer", "too late"],
)
async def test_a_job_that_cannot_be_answered_is_refused_with_a_code(
    job: messages.GenerationJob, code: str, param: str | None
) -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        log = await ask(bus, job)

    assert len(log.raw) == 1
    assert (failure(log).code, failure(log).param) == (code, param)


async def test_a_deadline_ends_a_running_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    job = new_job("echo", sampling=LONG, deadline=time.time() + 600)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=Brake(2)),
        reading(bus, job) as consumer,
    ):
        await publish(bus, job)
        log = await read(bus, job, consumer, num_tokens=1)
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 600)  # its timers are due
        log = await read(bus, job, consumer, log)

    assert failure(log).code == "deadline_exceeded"
    assert len(log.token_ids) == 1


async def test_a_body_that_is_no_job_goes_to_the_dead_letters_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies = [b"", b"\xff", messages.encode(Cancel(request_id="r")), SECRET_ROLE]
    async with MemoryBus() as bus, echo_worker(bus, max_num_seqs=len(bodies) - 1):
        for body in bodies:
            await bus.publish(topology.jobs_binding("echo", "interactive"), Message(body))
        log = await ask(bus, new_job("echo"))
        dead = await bus.inspect(topology.DEAD_LETTERS.name)

    assert isinstance(log.last, Finished)
    assert dead is not None
    assert dead.num_ready == len(bodies)
    rejected = [vars(record) for record in caplog.records if record.message == "job dead-lettered"]
    assert len(rejected) == len(bodies)
    assert "secret" not in str(rejected)


async def test_the_publisher_of_what_is_no_job_is_answered() -> None:
    job = new_job("echo")
    async with MemoryBus() as bus, echo_worker(bus), reading(bus, job) as consumer:
        message = Message(SECRET_ROLE, reply_to=f"reply.{job.request_id}", correlation_id="mine")
        await bus.publish(topology.jobs_binding("echo", "interactive"), message)
        answer = (await anext(consumer)).message

    event = messages.decode_event(answer.body)
    assert isinstance(event, Failed)
    assert (event.code, answer.correlation_id) == ("invalid_request", "mine")
    assert "role" in event.message


async def test_a_reply_address_outside_the_replies_is_refused() -> None:
    job = new_job("echo")
    async with MemoryBus() as bus, echo_worker(bus):
        await bus.publish(
            topology.jobs_binding("echo", "interactive"),
            Message(messages.encode(job), reply_to="jobs.echo.interactive"),
        )
        await ask(bus, new_job("echo"))
        dead = await bus.inspect(topology.DEAD_LETTERS.name)

    assert dead is not None
    assert dead.num_ready == 1


async def test_a_command_that_is_none_is_dropped() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        started = (await ask(bus, new_job("echo"))).raw[0]
        assert isinstance(started, Started)
        await bus.publish(topology.worker_binding(started.worker), Message(b"\xc1"))
        log = await ask(bus, new_job("echo"))

    assert isinstance(log.last, Finished)


async def test_cancel_ends_the_log_and_frees_the_engine_for_others() -> None:
    job = new_job("echo", sampling=LONG)
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005, max_num_seqs=1):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=3)
            (send,) = log.reader.cancel()
            await bus.publish(
                topology.worker_binding(send.address), Message(messages.encode(send.command))
            )
            log = await read(bus, job, consumer, log)
        other = await ask(bus, new_job("echo"))

    assert failure(log).code == "cancelled"
    assert len(log.token_ids) < 2000
    assert isinstance(other.last, Finished)


async def test_a_job_whose_reader_left_before_it_began_is_dropped() -> None:
    job = new_job("echo", sampling=LONG)
    async with MemoryBus() as bus:
        await bus.declare(topology.jobs_queue("echo", "interactive"))
        await publish(bus, job)
        async with echo_worker(bus, max_num_seqs=1):
            log = await ask(bus, new_job("echo"))
        queue = await bus.inspect(topology.jobs_queue("echo", "interactive").name)

    assert isinstance(log.last, Finished)
    assert queue is not None
    assert queue.num_ready == 0


async def test_a_worker_announces_itself_and_says_goodbye() -> None:
    queue = topology.announcements_queue("test")
    async with MemoryBus() as bus:
        await bus.declare(queue)
        async with bus.consume(queue.name) as consumer:
            async with echo_worker(bus, max_num_seqs=7):
                hello = messages.decode_announcement((await anext(consumer)).message.body)
            async for delivery in consumer:
                last = messages.decode_announcement(delivery.message.body)
                if last.is_leaving:
                    break

    assert (hello.model, hello.max_num_seqs, hello.is_leaving) == ("echo", 7, False)
    assert last.worker == hello.worker


class UnconfirmedBus(MemoryBus):
    """A process that hears announcements is on a node that is lost."""

    async def publish(self, binding: Binding, message: Message) -> None:
        await super().publish(binding, message)
        if binding == topology.ANNOUNCEMENTS:
            await asyncio.Event().wait()


async def test_a_worker_is_announced_further_if_nobody_confirms_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_ANNOUNCED_WITHIN_S", 0.05)
    queue = topology.announcements_queue("test")
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, UnconfirmedBus(broker) as unconfirmed:
        await bus.declare(queue)
        async with (
            bus.consume(queue.name) as consumer,
            echo_worker(unconfirmed, announce_interval_s=0.05),
        ):
            for _ in range(3):
                await asyncio.wait_for(anext(consumer), 30)


async def test_batch_jobs_wait_for_interactive_ones() -> None:
    """With a single slot, a later interactive job overtakes the queued batch."""
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    batch = [new_job("echo", sampling=sampling) for _ in range(6)]
    interactive, brake = new_job("echo", sampling=SamplingParams(max_tokens=5)), Brake(8)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake, max_num_seqs=2),
        reading(bus, interactive) as consumer,
    ):
        running = [asyncio.create_task(ask(bus, job, "batch")) for job in batch]
        await wait_running(bus)
        await publish(bus, interactive)
        log = await read(bus, interactive, consumer, attempt=1)
        brake.allow(40)  # enough for the jobs that run and the interactive job
        await read(bus, interactive, consumer, log)
        num_done = sum(task.done() for task in running)
        brake.release()
        await asyncio.gather(*running)

    assert num_done <= 2


async def test_a_batch_job_that_starves_behind_interactive_ones_gets_its_turn() -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"batch_patience_s": 0.3, "drain_grace_s": 0.1}
    prompts = [TextPrompt(text=text) for text in ("a", "b", "c", "d")]

    async def keep_asking(bus: MemoryBus) -> None:
        while True:
            await ask(bus, new_job("echo", *prompts, sampling=sampling))

    async with (
        MemoryBus() as bus,
        echo_worker(bus, step_s=0.005, max_num_seqs=2, **options),
    ):
        load = [asyncio.create_task(keep_asking(bus)) for _ in range(6)]
        await wait_running(bus)
        log = await ask(bus, new_job("echo"), "batch")
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)

    assert isinstance(log.last, Finished)


async def test_a_batch_job_has_no_turn_before_its_patience_ends() -> None:
    interactive, batch = [new_job("echo", sampling=ENDLESS) for _ in range(2)], new_job("echo")
    options: dict[str, Any] = {"batch_patience_s": 3600, "drain_grace_s": 0.1}
    brake = Brake()
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake, max_num_seqs=2, **options),
        AsyncExitStack() as readers,
    ):
        consumer_of = {
            job.request_id: await readers.enter_async_context(reading(bus, job))
            for job in [*interactive, batch]
        }
        for job in interactive:
            await publish(bus, job)
            log = await read(bus, job, consumer_of[job.request_id], attempt=1)
        await publish(bus, batch, "batch")
        await read(bus, batch, consumer_of[batch.request_id], attempt=1)
        brake.allow(200)
        await read(bus, job, consumer_of[job.request_id], log, num_tokens=100)
        said = await wait_announced(bus, lambda said: said.num_running == 2)

    assert (said.num_running_batch, said.num_waiting) == (0, 1)


async def test_a_batch_job_that_would_miss_its_deadline_has_interactive_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_pace(monkeypatch, token_s=1.0)
    usual = SamplingParams(max_tokens=20, ignore_eos=True)
    # It may end early, so it is not hopeless, but it usually takes longer than until its deadline.
    long = SamplingParams(max_tokens=8000, ignore_eos=True, stop_token_ids=(1,))
    options: dict[str, Any] = {"batch_patience_s": 600, "drain_grace_s": 0.1}

    async def keep_asking(bus: MemoryBus) -> None:
        while True:
            await ask(bus, new_job("echo", sampling=usual))

    async with (
        MemoryBus() as bus,
        echo_worker(bus, step_s=0.005, max_num_seqs=2, **options),
    ):
        await asyncio.gather(*(ask(bus, new_job("echo", sampling=usual)) for _ in range(8)))
        load = [asyncio.create_task(keep_asking(bus)) for _ in range(6)]
        job = new_job("echo", sampling=long, deadline=time.time() + 6000)
        async with reading(bus, job) as consumer:
            await publish(bus, job, "batch")
            log = await read(bus, job, consumer, num_tokens=1)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)

    assert log.token_ids


async def drain(bus: MemoryBus, address: str, *, is_immediate: bool = False) -> None:
    command = messages.encode(Drain(is_immediate=is_immediate))
    await bus.publish(topology.worker_binding(address), Message(command))


def worker_of(log: Log) -> str:
    assert log.reader.worker is not None
    return log.reader.worker


async def test_a_drained_worker_finishes_its_jobs_and_takes_no_more() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.01) as stopped:
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=1)
            await drain(bus, worker_of(log))
            log = await read(bus, job, consumer, log)
        await stopped.wait()
        queue = topology.jobs_queue("echo", "interactive").name
        while (state := await bus.inspect(queue)) is None or state.num_consumers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await publish(bus, new_job("echo"))
        state = await bus.inspect(queue)

    assert isinstance(log.last, Finished)
    assert log.reader.attempt == 1
    assert state is not None
    assert state.num_ready == 1


@pytest.mark.parametrize("is_second", [False, True], ids=["at once", "while it drains"])
async def test_an_immediate_drain_hands_the_jobs_over(*, is_second: bool) -> None:
    broker = MemoryBroker()
    job = new_job("echo", sampling=SamplingParams(max_tokens=200, ignore_eos=True))
    async with MemoryBus(broker) as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer, echo_worker(broker, brake=Brake(2)):
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=1)
            if is_second:
                await drain(bus, worker_of(log))
            await drain(bus, worker_of(log), is_immediate=True)
            async with echo_worker(broker):
                log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids
    assert (log.reader.attempt, log.reader.num_lost_runs) == (2, 0)


async def test_announcements_count_what_was_answered() -> None:
    queue = topology.announcements_queue("test")
    async with MemoryBus() as bus, echo_worker(bus):
        await asyncio.gather(*(ask(bus, new_job("echo")) for _ in range(3)))
        await bus.declare(queue)
        async with bus.consume(queue.name) as consumer:
            async for delivery in consumer:  # a reader has its answer before the job is settled
                said = messages.decode_announcement(delivery.message.body)
                if said.num_answered >= 3:
                    break

    assert said.num_answered == 3


async def test_started_repeats_what_readers_need_of_the_job() -> None:
    job = msgspec.structs.replace(
        new_job("echo", TextPrompt(text="Once"), TokenPrompt(token_ids=(504, 253))),
        publication=3,
        context=b"context",
        wants_prompt_text=True,
    )
    async with MemoryBus() as bus, echo_worker(bus):
        started = (await ask(bus, job)).raw[0]

    assert isinstance(started, Started)
    assert (started.publication, started.context) == (3, b"context")
    assert started.num_prompt_tokens == (1, 2)
    assert (started.prompt_texts[0], len(started.prompt_texts)) == ("Once", 2)


async def test_the_health_port_shows_life_health_and_load() -> None:
    port = free_port()

    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        await ask(bus, new_job("echo"))
        answers = {
            path: await asyncio.to_thread(status_and_text, port, path)
            for path in ("live", "health", "metrics", "else")
        }

    assert [answers[path][0] for path in answers] == [200, 200, 200, 404]
    metrics = answers["metrics"][1]
    assert total(metrics, "warren_worker_generation_tokens_total") == 8
    assert total(metrics, "warren_worker_prompt_tokens_total") == 4
    assert total(metrics, "warren_worker_prefix_cache_queries_total") == 4
    assert total(metrics, "warren_worker_step_duration_seconds_count") >= 8
    assert total(metrics, "warren_worker_sequences_running") == 0


async def test_a_worker_that_is_ready_says_how_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async with MemoryBus() as bus, echo_worker(bus, max_num_seqs=7):
        (banner,) = [vars(record) for record in caplog.records if record.message == "worker ready"]

    assert (banner["model"], banner["device"], banner["max_num_seqs"]) == ("echo", "cpu", 7)
    assert banner["kv_cache_tokens"] == 8192 * 16
    assert banner["worker"].startswith("worker.")


def test_a_worker_that_loads_its_model_is_live_and_not_healthy() -> None:
    port = free_port()

    with HealthServer(Listener("127.0.0.1", port)):
        statuses = {path: status_and_text(port, path)[0] for path in ("live", "health")}
        status, text = status_and_text(port, "metrics")

    assert statuses == {"live": 200, "health": 503}
    assert status == 200, "Prometheus would take the worker for dead"
    assert "warren_build_info" in text


class BusThatHoldsBack(MemoryBus):
    """Lets nobody consume a queue before ``may_consume`` is set."""

    def __init__(self, queue: str) -> None:
        super().__init__()
        self._queue = queue
        self.is_asked = asyncio.Event()
        self.may_consume = asyncio.Event()

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        if queue == self._queue:
            self.is_asked.set()
            await self.may_consume.wait()
        async with super().consume(queue, prefetch=prefetch, is_exclusive=is_exclusive) as consumer:
            yield consumer


async def test_a_worker_is_healthy_once_it_consumes_all_of_its_queues() -> None:
    port = free_port()
    held_back = topology.jobs_queue("echo", "batch").name

    async def status() -> int:
        return (await asyncio.to_thread(status_and_text, port, "health"))[0]

    async with BusThatHoldsBack(held_back) as bus, echo_worker(bus, health_port=port):
        await bus.is_asked.wait()
        before = await status()
        bus.may_consume.set()
        async with asyncio.timeout(30):
            while await status() != 200:
                pass

    assert before == 503


async def test_the_health_port_is_this_machines_alone() -> None:
    port = free_port()

    async with MemoryBus() as bus, echo_worker(bus, health_port=port):
        for address in ("127.0.0.1", "127.0.0.2"):
            try:
                socket.create_connection((address, port)).close()
                is_open = True
            except ConnectionRefusedError:
                is_open = False

            assert is_open == (address == "127.0.0.1")


async def test_a_worker_whose_engine_hangs_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    port, may_go_on = free_port(), threading.Event()
    hanging = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: may_go_on.wait(60))
    monkeypatch.setattr(echo, "time", hanging)

    def live() -> int:
        return status_and_text(port, "live")[0]

    options: dict[str, Any] = {"health_port": port, "stall_timeout_s": 0.1}
    async with MemoryBus() as bus, echo_worker(bus, **options), asyncio.timeout(60):
        before = await asyncio.to_thread(live)
        asking = asyncio.create_task(
            ask(bus, new_job("echo", sampling=SamplingParams(max_tokens=1)))
        )
        while await asyncio.to_thread(live) != 503:
            pass
        is_hanging = not asking.done()
        may_go_on.set()
        await asking
        while await asyncio.to_thread(live) != 200:
            pass

    assert before == 200
    assert is_hanging


@pytest.mark.rabbit
async def test_the_account_is_checked_before_the_model_is_loaded(broker: Broker) -> None:
    settings = WorkerSettings(model="no-such-model", health_port=None)

    async with RabbitBus(broker.url_of("publisher")) as bus:
        with pytest.raises(StartupError, match="lacks the permissions of a worker"):
            await service.run_worker(settings, bus, stop=asyncio.Event())
