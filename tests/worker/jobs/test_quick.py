"""Quick jobs, through a whole worker."""

import asyncio
import time

import msgspec
import pytest

from shared import topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    Detokenized,
    DetokenizeJob,
    EmbeddingJob,
    Failed,
    QuickAnswer,
    QuickJob,
    ReplyEvent,
    SamplingParams,
    TextPrompt,
    Tokenized,
    TokenizeJob,
    TokenPrompt,
    decode_event,
    encode,
)
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import (
    come_back,
    new_job,
    num_ready,
    publish,
    read,
    reading,
    wait_consumers,
)
from tests.support.workers.synthetic import echo_worker
from worker.decode.embedding import ComputeTime
from worker.decode.served_model import ServedModel
from worker.jobs import quick
from worker.text import Tokenizer


async def ask(bus: Bus, body: bytes | QuickJob) -> ReplyEvent:
    queue = topology.reply_queue("quick-test", expires_s=30)
    await bus.declare(queue)
    message = Message(
        body if isinstance(body, bytes) else encode(body),
        correlation_id="mine",
        reply_to=queue.name,
    )
    async with bus.consume(queue.name) as consumer:
        await bus.publish(topology.jobs_binding("echo", "quick"), message)
        delivery = await anext(consumer)
        await delivery.ack()
        assert delivery.message.correlation_id == "mine"
        return decode_event(delivery.message.body)


async def answer(body: bytes | QuickJob) -> ReplyEvent:
    async with MemoryBus() as bus, echo_worker(bus):
        return await ask(bus, body)


async def test_text_becomes_tokens_as_they_stand_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    prompt = TextPrompt(text="Hello world")
    answered = await answer(TokenizeJob(request_id="r", model="echo", prompt=prompt))

    assert isinstance(answered, Tokenized)
    assert list(answered.token_ids) == tokenizer.encode(prompt)
    assert answered.tokens == ("Hello", "Ġworld")
    assert answered.max_seq_len == 8192


async def test_an_answer_that_no_message_holds_is_refused() -> None:
    prompt = TextPrompt(text="Hello world " * 1000)
    job = TokenizeJob(request_id="r", model="echo", prompt=prompt)
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker, max_message_bytes=10_000) as worker_bus,
        echo_worker(worker_bus),
    ):
        answered = await ask(bus, job)

    assert isinstance(answered, Failed)
    assert "too long for one message" in answered.message


async def test_a_long_text_is_refused_before_it_is_tokenized() -> None:
    """Its tokens would take seconds, and more room than an answer has."""
    prompt = TextPrompt(text="漢" * (1 << 20))
    answered = await answer(TokenizeJob(request_id="r", model="echo", prompt=prompt))

    assert isinstance(answered, Failed)
    assert (answered.code, answered.param) == ("context_length_exceeded", "prompt")


async def test_the_texts_of_one_tenant_do_not_delay_the_text_of_another() -> None:
    replies = topology.reply_queue("quick-test", expires_s=60)
    long, short = TextPrompt(text="word " * 50_000), TextPrompt(text="word")
    jobs = [
        *(
            TokenizeJob(request_id=f"a{k}", model="echo", prompt=long, tenant="a")
            for k in range(12)
        ),
        TokenizeJob(request_id="b", model="echo", prompt=short, tenant="b"),
    ]
    async with MemoryBus() as bus:
        await bus.declare(topology.jobs_queue("echo", "quick"), replies)
        for job in jobs:
            message = Message(encode(job), correlation_id=job.request_id, reply_to=replies.name)
            await bus.publish(topology.jobs_binding("echo", "quick"), message)
        async with echo_worker(bus), bus.consume(replies.name) as consumer:
            order = [(await anext(consumer)).message.correlation_id for _ in jobs]

    assert order.index("b") < 4


async def test_an_empty_text_has_no_tokens() -> None:
    prompt = TextPrompt(text="")
    answered = await answer(TokenizeJob(request_id="r", model="echo", prompt=prompt))

    assert isinstance(answered, Tokenized)
    assert answered.token_ids == ()


async def test_a_chat_becomes_the_tokens_of_its_prompt(tokenizer: Tokenizer) -> None:
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
    answered = await answer(TokenizeJob(request_id="r", model="echo", prompt=chat))

    assert isinstance(answered, Tokenized)
    assert list(answered.token_ids) == tokenizer.encode(chat)


async def test_tokens_become_text_with_special_ones_written_out() -> None:
    answered = await answer(DetokenizeJob(request_id="r", model="echo", token_ids=(1, 19556, 2)))

    assert isinstance(answered, Detokenized)
    assert answered.text == "<|im_start|>Hello<|im_end|>"


@pytest.mark.parametrize(
    ("job", "code", "param"),
    [
        (
            DetokenizeJob(request_id="r", model="echo", token_ids=(1 << 20,)),
            "invalid_request",
            "tokens",
        ),
        (
            TokenizeJob(
                request_id="r", model="echo", prompt=TextPrompt(text="x"), deadline=time.time() - 1
            ),
            "deadline_exceeded",
            None,
        ),
        (
            EmbeddingJob(request_id="r", model="echo", prompts=(TokenPrompt(token_ids=(1,)),)),
            "invalid_request",
            "model",
        ),
        (b"no job", "invalid_request", None),
    ],
    ids=["unknown token", "too late", "no embeddings", "no job"],
)
async def test_what_cannot_be_answered_is_refused_with_a_code(
    job: bytes | QuickJob, code: str, param: str | None
) -> None:
    answered = await answer(job)

    assert isinstance(answered, Failed)
    assert (answered.code, answered.param) == (code, param)


async def test_quick_jobs_are_answered_across_lost_connections() -> None:
    job = DetokenizeJob(request_id="r", model="echo", token_ids=(1,))
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, MemoryBus(broker) as theirs, echo_worker(theirs):
        answers = []
        for _ in range(3):
            answers.append(await ask(bus, job))
            theirs.sever()

    assert all(isinstance(answer, Detokenized) for answer in answers)


async def test_quick_jobs_do_not_wait_behind_generations() -> None:
    long = new_job("echo", sampling=SamplingParams(max_tokens=2000, ignore_eos=True))
    job = DetokenizeJob(request_id="r", model="echo", token_ids=(1,))
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=Brake(3), max_num_seqs=1, drain_grace_s=0.1),
        reading(bus, long) as consumer,
    ):
        await publish(bus, long)
        await read(bus, long, consumer, num_tokens=1)
        answered = await ask(bus, job)  # while the generation stands still

    assert isinstance(answered, Detokenized)


async def test_quick_jobs_wait_while_a_suspect_runs_and_not_while_it_waits() -> None:
    long, suspect = (
        new_job("echo", sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for max_tokens in (2000, 60)
    )
    suspect = msgspec.structs.replace(suspect, publication=1)
    job, brake = DetokenizeJob(request_id="r", model="echo", token_ids=(1,)), Brake(3)
    async with (
        MemoryBus() as bus,
        echo_worker(bus, brake=brake),
        reading(bus, long) as long_consumer,
        reading(bus, suspect) as consumer,
    ):
        await publish(bus, long)
        long_log = await read(bus, long, long_consumer, num_tokens=1)
        await publish(bus, suspect, "suspect")
        await wait_consumers(bus, topology.jobs_queue("echo", "interactive").name, 0)
        beside_waiting = await ask(bus, job)
        (send,) = long_log.reader.cancel()
        await bus.publish(topology.worker_binding(send.address), Message(encode(send.command)))
        await read(bus, long, long_consumer, long_log)  # to its end
        log = await brake.allow_until(read(bus, suspect, consumer, num_tokens=1))
        beside_running = asyncio.create_task(ask(bus, job))
        await asyncio.sleep(0)  # the job is published
        brake.release()
        await read(bus, suspect, consumer, log)
        is_answered_beside = beside_running.done()
        answered = await beside_running

    assert isinstance(beside_waiting, Detokenized)
    assert not is_answered_beside
    assert isinstance(answered, Detokenized)


class UnsettledBus(MemoryBus):
    """Its broker was away a moment ago."""

    is_settled = False


async def test_a_drain_lets_quick_jobs_finish_and_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, taken, may_answer = quick.answer, asyncio.Event(), asyncio.Event()
    queue = topology.jobs_queue("echo", "quick").name

    async def compute_slowly(job: QuickJob, model: ServedModel, time: ComputeTime) -> QuickAnswer:
        taken.set()
        await may_answer.wait()
        return await compute(job, model, time)

    monkeypatch.setattr(quick, "answer", compute_slowly)
    job = DetokenizeJob(request_id="r", model="echo", token_ids=(1,))
    async with MemoryBus() as bus:
        async with echo_worker(bus, drain_grace_s=600) as stop:
            answering = asyncio.create_task(ask(bus, job))
            await taken.wait()
            stop.set()
            await wait_consumers(bus, queue, 0)
            await bus.publish(topology.jobs_binding("echo", "quick"), Message(encode(job)))
            may_answer.set()
        answered = await answering
        num_left = await num_ready(bus, queue)

    assert isinstance(answered, Detokenized)
    assert num_left == 1


async def answer_returned(
    num_returns: int, bus_class: type[MemoryBus] = MemoryBus
) -> tuple[ReplyEvent, int]:
    """The answer to a quick job that came back so often, and the number of dead letters."""
    job = DetokenizeJob(request_id="r", model="echo", token_ids=(1,))
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, bus_class(broker) as theirs, asyncio.timeout(60):
        await topology.declare_worker(bus, "echo", "test")
        asking = asyncio.create_task(ask(bus, job))
        await come_back(bus, job, "quick", num_returns)
        async with echo_worker(theirs):
            answered = await asking
        return answered, await num_ready(bus, topology.DEAD_LETTERS.name)


async def test_a_quick_job_that_four_workers_lost_is_dead_lettered() -> None:
    answered, num_dead = await answer_returned(4)

    assert isinstance(answered, Failed)
    assert (answered.code, num_dead) == ("worker_lost", 1)


@pytest.mark.parametrize(("num_returns", "bus_class"), [(3, MemoryBus), (4, UnsettledBus)])
async def test_fewer_returns_and_lost_connections_do_not_dead_letter_a_quick_job(
    num_returns: int, bus_class: type[MemoryBus]
) -> None:
    answered, num_dead = await answer_returned(num_returns, bus_class)

    assert (type(answered), num_dead) == (Detokenized, 0)
