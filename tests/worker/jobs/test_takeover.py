"""Jobs that change hands: after a crash, in a drain, published twice, left by their reader."""

import asyncio
import logging
from contextlib import AsyncExitStack
from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import messages, topology
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.log import LogWriter
from shared.messages import (
    Constraint,
    Continue,
    Failed,
    Finished,
    PromptScores,
    SamplingParams,
    Started,
    TextPrompt,
    TokenDelta,
)
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    Log,
    ask,
    come_back,
    new_job,
    publish,
    read,
    reading,
    say_started,
    wait_consumers,
)
from tests.support.workers.synthetic import doomed_worker, echo_worker
from worker.engine import engine
from worker.process import service

LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)


async def test_a_job_goes_on_in_another_worker_after_its_connection_broke() -> None:
    broker, brake = MemoryBroker(), Brake(11)
    jobs_queue = topology.jobs_queue("echo", "interactive").name
    job = new_job("echo", sampling=SamplingParams(max_tokens=600, seed=5, ignore_eos=True))
    async with MemoryBus(broker) as bus, MemoryBus(broker) as first:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with echo_worker(first, brake=brake), reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=10)
            async with echo_worker(broker):
                await wait_consumers(bus, jobs_queue, 2)
                first.sever()
                log = await read(bus, job, consumer, log, attempt=2)
                brake.release()
                log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids
    assert log.text == undisturbed.text


async def test_an_older_copy_of_a_job_does_not_take_the_newer_one_with_it() -> None:
    """The publisher of the newer copy was cut off before it could acknowledge the older copy."""
    older = new_job("echo", sampling=SamplingParams(max_tokens=60, seed=5, ignore_eos=True))
    newer = msgspec.structs.replace(older, publication=1)
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005):
        undisturbed = await ask(bus, older)
        async with reading(bus, newer) as consumer, asyncio.timeout(60):
            await publish(bus, newer)
            log = await read(bus, newer, consumer, num_tokens=5)
            await publish(bus, older)
            log = await read(bus, newer, consumer, log)

    assert log.token_ids == undisturbed.token_ids


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
async def test_a_run_whose_delivery_another_one_has_claimed_comes_again_as_a_newer_one(
    is_read: bool,
) -> None:
    """The broker took the first worker for dead without counting it. Either may have the job."""
    job = new_job("echo", sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    async with MemoryBus() as bus, AsyncExitStack() as stack:
        await topology.declare_worker(bus, "echo", "test")
        consumer = await stack.enter_async_context(reading(bus, job))
        await publish(bus, job)
        await come_back(bus, job, "interactive", 1)
        await say_started(bus, job, num_returns=1)
        if not is_read:
            await stack.aclose()
        async with echo_worker(bus):
            if not is_read:
                await asyncio.sleep(0.3)
                consumer = await stack.enter_async_context(reading(bus, job))
            log = await read(bus, job, consumer)

    started = [event for event in log.raw if isinstance(event, Started)]
    assert [event.num_returns for event in started] == [1, 1, 2]
    assert (log.reader.attempt, len(log.token_ids)) == (3, 20)


DIGITS = Constraint(kind="regex", source=r"([0-9]{1,3} [a-z]{2,9}, ){30}")
DRAWS = {
    "penalties": SamplingParams(
        max_tokens=40,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={300: 2.0},
        ignore_eos=True,
    ),
    "bans": SamplingParams(
        max_tokens=40,
        min_tokens=30,
        bad_words=("the end", "a"),
        allowed_token_ids=tuple(range(0, 49152, 3)),
    ),
    "grammar": SamplingParams(max_tokens=40, constraint=DIGITS),
    "grammar and logprobs": SamplingParams(
        max_tokens=40, constraint=DIGITS, frequency_penalty=0.5, logprobs=2, prompt_logprobs=1
    ),
}


@pytest.mark.parametrize("name", DRAWS)
async def test_all_choices_go_on_after_their_worker_died(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the state that their draws depend on, and each at its own token."""
    monkeypatch.setattr(engine, "MAX_PREPARATION_S", 3600.0)  # each step draws for all choices
    prompts = TextPrompt(text="Once upon a time"), TextPrompt(text="Far away")
    job = msgspec.structs.replace(new_job("echo", *prompts, sampling=DRAWS[name]), num_choices=3)
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer:
            async with doomed_worker(broker, brake=Brake(28)):
                await publish(bus, job)
                log = await read(bus, job, consumer, num_tokens=12)
            async with echo_worker(broker):
                log = await read(bus, job, consumer, log)

    assert log.reader.attempt >= 2
    assert by_choice(log) == by_choice(undisturbed)
    assert scores(log) == scores(undisturbed)


def by_choice(log: Log) -> dict[int, list[object]]:
    """Of each choice its tokens with their scores, its text and its end."""
    token_ids: dict[int, list[object]] = {k: [""] for k in range(len(log.reader.chains))}
    for event in log.accepted:
        if isinstance(event, TokenDelta | Finished):
            choice = token_ids[event.choice]
            choice[0] = str(choice[0]) + event.text
            choice += zip_longest(event.token_ids, event.logprobs)
        if isinstance(event, Finished):
            choice += [event.finish_reason, event.stop_reason]
    return token_ids


def scores(log: Log) -> list[tuple[int, int, object]]:
    return sorted(
        (event.prompt, event.start, event.logprobs)
        for event in log.accepted
        if isinstance(event, PromptScores)
    )


async def test_a_long_stream_goes_on_behind_its_tokens() -> None:
    sampling = SamplingParams(max_tokens=700, stop=("\n\nUser:",), ignore_eos=True)
    job = new_job("echo", sampling=sampling)
    async with MemoryBus() as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, new_job("echo", sampling=sampling))
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await say_started(bus, job, num_returns=0)
            first = LogWriter(1, 1).delta(0, undisturbed.token_ids[:600], "")
            reply = topology.reply_binding(f"reply.{job.request_id}")
            await bus.publish(reply, Message(messages.encode(first)))
            await come_back(bus, job, "interactive", 1)
            async with echo_worker(bus):
                log = await read(bus, job, consumer)

    assert log.token_ids == undisturbed.token_ids
    assert log.text
    assert undisturbed.text.endswith(log.text)


async def test_draining_hands_running_jobs_over_without_a_crash() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=300, ignore_eos=True))
    async with MemoryBus() as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer:
            async with echo_worker(bus, brake=Brake(6), drain_grace_s=0.05) as stop:
                await publish(bus, job)
                log = await read(bus, job, consumer, num_tokens=5)
                stop.set()
            async with echo_worker(bus):
                log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids
    assert (log.reader.attempt, log.reader.num_lost_runs) == (2, 0)


class MuteBus(MemoryBus):
    """Confirms no event from some time on."""

    is_mute = False

    async def publish(self, binding: Binding, message: Message) -> None:
        if self.is_mute and binding.exchange == topology.REPLIES:
            await asyncio.Event().wait()
        await super().publish(binding, message)


async def test_a_run_that_a_drain_cuts_off_has_a_line_and_a_span(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(service, "_HAND_OVER_TIMEOUT_S", 0.1)
    job, broker = new_job("echo", sampling=LONG), MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        MuteBus(broker) as mute,
        reading(bus, job) as consumer,
        echo_worker(mute, step_s=0.01, drain_grace_s=0.05),
    ):
        await publish(bus, job)
        await read(bus, job, consumer, num_tokens=5)
        mute.is_mute = True

    (line,) = (vars(one) for one in caplog.records if one.message == "job handed over")
    assert (line["outcome"], line["reason"]) == ("handed_over", "drain")
    assert "worker.run" in [span.name for span in spans.get_finished_spans()]


async def test_draining_lets_short_answers_finish() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    async with MemoryBus() as bus, reading(bus, job) as consumer:
        async with echo_worker(bus, step_s=0.01) as stop:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=2)
            stop.set()
        log = await read(bus, job, consumer, log)

    assert log.reader.attempt == 1
    assert isinstance(log.last, Finished)


async def test_a_job_that_was_published_twice_is_answered_once() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await publish(bus, job)
            log = await read(bus, job, consumer)
        undisturbed = await ask(bus, job)

    assert log.token_ids == undisturbed.token_ids


async def test_a_continue_that_does_not_fit_the_job_is_dropped() -> None:
    job = new_job("echo", sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.005):
        undisturbed = await ask(bus, job)
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=3)
            wrong = Continue(
                request_id=job.request_id, ticket=str(log.reader.ticket), attempt=9, choices=()
            )
            address = topology.worker_binding(str(log.reader.worker))
            await bus.publish(address, Message(messages.encode(wrong)))
            log = await read(bus, job, consumer, log)

    assert log.token_ids == undisturbed.token_ids


async def test_an_answer_that_nobody_reads_is_cancelled_after_the_grace() -> None:
    job = new_job("echo", sampling=LONG)
    options: dict[str, Any] = {"max_num_seqs": 1, "reader_grace_s": 0.1}
    async with MemoryBus() as bus, echo_worker(bus, step_s=0.01, **options):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await read(bus, job, consumer, num_tokens=1)
        await ask(bus, new_job("echo"))  # its turn comes when the other one is done
        async with reading(bus, job) as consumer:
            log = await read(bus, job, consumer)

    assert isinstance(log.last, Failed)
    assert log.last.code == "cancelled"
