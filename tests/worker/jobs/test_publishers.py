"""What publishers cannot do to each other, and to the tenants of gateways."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import msgspec
import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.messages import (
    JSON,
    MAX_CHOICES,
    AdmissionAnswer,
    Cancel,
    Completed,
    Drain,
    EmbeddingJob,
    Failed,
    Finished,
    GenerationJob,
    LimitedTenants,
    SamplingParams,
    Started,
    StopWork,
    TextPrompt,
    TokenizeJob,
    TokenPrompt,
    decode_event,
    encode,
)
from shared.topology import Publishers
from tests.support.workers.jobs import Log, ask, new_job, num_ready, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from worker.jobs.delivery import JobDelivery, as_message
from worker.jobs.run import LAST_RETURNS

PROMPT = TokenPrompt(token_ids=tuple(range(100, 140)))
NUM_IN_FULL_BLOCKS = 32
LONG = SamplingParams(max_tokens=60, ignore_eos=True)

_NUMBERS = count()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def worker(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The bus of a worker."""
    async with MemoryBus(broker, user="worker") as bus, echo_worker(bus, step_s=0.002):
        yield bus


@pytest.fixture
async def alice(broker: MemoryBroker, worker: MemoryBus) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(broker, user="alice") as bus:
        yield bus


@pytest.fixture
async def mallory(broker: MemoryBroker, worker: MemoryBus) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(broker, user="mallory") as bus:
        yield bus


def job_of(user: str, sampling: SamplingParams | None = None, tenant: str = "") -> GenerationJob:
    job = new_job("echo", PROMPT, sampling=sampling)
    return msgspec.structs.replace(job, request_id=f"{user}.{next(_NUMBERS)}", tenant=tenant)


async def wait_rejected(bus: MemoryBus) -> None:
    while await num_ready(bus, topology.DEAD_LETTERS.name) == 0:  # noqa: ASYNC110 (nobody says when)
        await asyncio.sleep(0.01)


def num_cached_tokens(log: Log) -> int:
    assert isinstance(log.last, Finished)
    return log.last.num_cached_tokens


async def test_a_job_of_a_publishers_own_name_is_answered(alice: MemoryBus) -> None:
    log = await ask(alice, job_of("alice"))

    assert isinstance(log.last, Finished)


@pytest.mark.parametrize(
    ("user", "request_id", "reply_key"),
    [
        ("mallory", "alice.1", "reply.mallory.1"),
        ("mallory", "mallory-1", "reply.mallory.1"),
        ("mallory", "mallory", "reply.mallory.1"),
        ("mallory", "chatcmpl-00112233445566778899aabbccddeeff", "reply.mallory.1"),
        ("mallory", "mallory.1", "reply.alice.1"),
        ("mallory", "mallory.1", "reply.chatcmpl-00112233445566778899aabbccddeeff"),
        ("", "mallory.1", "reply.mallory.1"),
        ("", ".1", "reply..1"),
    ],
)
@pytest.mark.parametrize("lane", ["interactive", "quick"])
async def test_other_names_are_rejected(
    broker: MemoryBroker,
    worker: MemoryBus,
    user: str,
    request_id: str,
    reply_key: str,
    lane: topology.Lane,
) -> None:
    prompt = TextPrompt(text="Hello")
    job = (
        TokenizeJob(request_id=request_id, model="echo", prompt=prompt)
        if lane == "quick"
        else GenerationJob(request_id=request_id, model="echo", prompts=(prompt,))
    )
    log = topology.reply_queue(reply_key.removeprefix("reply."), expires_s=30)
    await worker.declare(log)
    async with MemoryBus(broker, user=user) as bus:
        await bus.publish(
            topology.jobs_binding("echo", lane), Message(encode(job), reply_to=reply_key)
        )
        await wait_rejected(worker)

    is_own_log = user and reply_key.startswith(f"reply.{user}.")
    assert await num_ready(worker, log.name) == (1 if is_own_log else 0)


@pytest.mark.parametrize("lane", ["interactive", "quick"])
async def test_a_refusal_is_answered_where_its_publisher_reads(
    mallory: MemoryBus, lane: topology.Lane
) -> None:
    log = topology.reply_queue("mallory.1", expires_s=30)
    await mallory.declare(log)
    job = msgspec.structs.replace(job_of("alice"), mode="final")
    body = encode(job) if lane == "interactive" else b"no job"

    async with mallory.consume(log.name) as consumer:
        await mallory.publish(topology.jobs_binding("echo", lane), Message(body, reply_to=log.name))
        answer = decode_event((await anext(consumer)).message.body)

    assert isinstance(answer, Failed)
    assert answer.code == "invalid_request"


async def test_a_job_with_too_many_choices_for_all_prompts_is_refused(mallory: MemoryBus) -> None:
    log = topology.reply_queue("mallory.1", expires_s=30)
    await mallory.declare(log)
    job = msgspec.structs.replace(
        new_job("echo", PROMPT, PROMPT, mode="final"),
        request_id="mallory.1",
        num_choices=MAX_CHOICES // 2 + 1,
    )

    async with mallory.consume(log.name) as consumer:
        binding = topology.jobs_binding("echo", "interactive")
        await mallory.publish(binding, Message(encode(job), reply_to=log.name))
        answer = decode_event((await anext(consumer)).message.body)

    assert isinstance(answer, Failed)
    assert "choices" in answer.message


@pytest.mark.parametrize("lane", ["interactive", "quick"])
async def test_a_refusal_is_not_written_into_anothers_log(
    worker: MemoryBus, mallory: MemoryBus, lane: topology.Lane
) -> None:
    log = topology.reply_queue("alice.1", expires_s=30)
    await worker.declare(log)

    await mallory.publish(
        topology.jobs_binding("echo", lane), Message(b"no job", reply_to=log.name)
    )
    await wait_rejected(worker)

    assert await num_ready(worker, log.name) == 0


async def test_the_tenant_is_the_publisher_whatever_the_job_says(
    alice: MemoryBus, mallory: MemoryBus
) -> None:
    await ask(alice, job_of("alice"))
    probe = await ask(mallory, job_of("mallory", tenant="alice"))
    own = await ask(alice, job_of("alice", tenant="mallory"))

    assert num_cached_tokens(probe) == 0
    assert num_cached_tokens(own) == NUM_IN_FULL_BLOCKS


async def test_a_gateway_names_the_tenant(broker: MemoryBroker, alice: MemoryBus) -> None:
    await ask(alice, job_of("alice"))
    async with MemoryBus(broker, user="gateway") as gateway:
        of_another = await ask(gateway, job_of("chatcmpl", tenant="bob"))
        of_the_same = await ask(gateway, job_of("chatcmpl", tenant="alice"))

    assert num_cached_tokens(of_another) == 0
    assert num_cached_tokens(of_the_same) == NUM_IN_FULL_BLOCKS


async def test_a_publisher_cannot_claim_that_its_job_was_returned(
    mallory: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    job = msgspec.structs.replace(job_of("mallory"), mode="final")
    message = Message(
        encode(job),
        correlation_id=job.request_id,
        reply_to=f"reply.{job.request_id}",
        headers={"warren-returns": LAST_RETURNS},
    )

    async with reading(mallory, job) as consumer:
        await mallory.publish(topology.jobs_binding("echo", "interactive"), message)
        log = await read(mallory, job, consumer)

    assert isinstance(log.completed, Completed)
    assert "job moved" not in caplog.messages


async def test_a_run_is_not_superseded_by_another_publisher(
    worker: MemoryBus, alice: MemoryBus, mallory: MemoryBus
) -> None:
    job = job_of("alice", LONG)
    async with reading(alice, job) as consumer:
        await publish(alice, job)
        log = await read(alice, job, consumer, num_tokens=3)
        for reply_key in (f"reply.{job.request_id}", "reply.mallory.x"):
            again = msgspec.structs.replace(job, publication=9, context=b"planted")
            await mallory.publish(
                topology.jobs_binding("echo", "interactive"),
                Message(encode(again), reply_to=reply_key),
            )
        await wait_rejected(worker)
        log = await read(alice, job, consumer, log)

    assert len(log.token_ids) == LONG.max_tokens
    assert [type(event) for event in log.raw].count(Started) == 1


async def test_a_run_is_not_cancelled_by_another_publisher(
    alice: MemoryBus, mallory: MemoryBus
) -> None:
    job = job_of("alice", LONG)
    async with reading(alice, job) as consumer:
        await publish(alice, job)
        log = await read(alice, job, consumer, num_tokens=3)
        address = topology.worker_binding(str(log.reader.worker))
        for ticket in (None, log.reader.ticket):
            cancel = Cancel(request_id=job.request_id, ticket=ticket)
            await mallory.publish(address, Message(encode(cancel)))
        log = await read(alice, job, consumer, log)

    assert len(log.token_ids) == LONG.max_tokens


async def test_a_publisher_cancels_its_own_run(alice: MemoryBus) -> None:
    job = job_of("alice", SamplingParams(max_tokens=5000, ignore_eos=True))
    async with reading(alice, job) as consumer:
        await publish(alice, job)
        log = await read(alice, job, consumer, num_tokens=3)
        (send,) = log.reader.cancel()
        await alice.publish(topology.worker_binding(send.address), Message(encode(send.command)))
        log = await read(alice, job, consumer, log)

    assert isinstance(log.last, Failed)
    assert log.last.code == "cancelled"


async def test_a_configured_user_is_trusted(broker: MemoryBroker) -> None:
    async with (
        MemoryBus(broker, user="worker-1") as bus,
        echo_worker(bus, trusted_users="edge"),
        MemoryBus(broker, user="edge") as edge,
    ):
        log = await ask(edge, new_job("echo"))

    assert isinstance(log.last, Finished)


def test_an_embedding_is_of_its_publishers_tenant() -> None:
    job = EmbeddingJob(
        request_id="alice.1", model="m", prompts=(TextPrompt(text="x"),), tenant="bob"
    )
    message = Message(b"", reply_to="reply.alice.1", user_id="alice")

    assert Publishers(()).admitted(job, message).tenant == "alice"


def test_a_publisher_cannot_number_executions_or_say_what_is_counted() -> None:
    job = msgspec.structs.replace(job_of("alice"), execution=7, is_counted=True)
    reply_to = f"reply.{job.request_id}"
    publishers = Publishers(("gateway",))

    of_alice = publishers.admitted(job, Message(b"", reply_to=reply_to, user_id="alice"))
    of_gateway = publishers.admitted(job, Message(b"", reply_to=reply_to, user_id="gateway"))

    assert (of_alice.execution, of_alice.is_counted) == (0, False)
    assert (of_gateway.execution, of_gateway.is_counted) == (7, True)


def test_only_trusted_users_drain_workers() -> None:
    publishers = Publishers(("gateway",))

    assert publishers.may_command("gateway", Drain())
    assert not publishers.may_command("mallory", Drain())
    assert publishers.may_command("gateway", StopWork(tenant="mallory"))
    assert not publishers.may_command("mallory", StopWork(tenant="mallory"))
    told = LimitedTenants(gateway="g", tenants=("alice",), valid_s=1.0)
    for command in (told, AdmissionAnswer(number=0)):
        assert publishers.may_command("gateway", command)
        assert not publishers.may_command("mallory", command)
    assert publishers.may_command("mallory", Cancel(request_id="mallory.1"))
    assert not publishers.may_command("mallory", Cancel(request_id="alice.1"))


@pytest.mark.parametrize("lane", ["interactive", "quick"])
async def test_unknown_fields_are_ignored_and_named_in_the_answer_and_in_the_log(
    mallory: MemoryBus, lane: topology.Lane, caplog: pytest.LogCaptureFixture
) -> None:
    log = topology.reply_queue("mallory.1", expires_s=30)
    await mallory.declare(log)
    job: dict[str, object] = {"request_id": "mallory.1", "model": "echo"}
    prompt = {"type": "text", "text": "Hello", "txt": ""}
    if lane == "quick":
        job |= {"type": "tokenize_job", "prompt": prompt, "samplign": {}}
    else:
        job |= {"type": "generation_job", "prompts": [prompt], "samplign": {}}
        job["sampling"] = {"max_tokens": 3}
    forged = {"warren-ignored-fields": "forged"}

    async with mallory.consume(log.name) as consumer:
        message = Message(msgspec.json.encode(job), JSON, reply_to=log.name, headers=forged)
        await mallory.publish(topology.jobs_binding("echo", lane), message)
        answer = (await anext(consumer)).message

    assert not isinstance(decode_event(answer.body, JSON), Failed)
    path = "prompt.txt" if lane == "quick" else "prompts[0].txt"
    assert answer.headers == {"warren-ignored-fields": f"{path}, samplign"}
    (line,) = (vars(one) for one in caplog.records if one.message == "fields ignored")
    assert (line["tenant"], line["fields"]) == ("mallory", f"{path}, samplign")


async def test_the_message_that_replaces_a_job_still_names_its_unknown_fields(
    broker: MemoryBroker,
) -> None:
    job = job_of("mallory")
    body = msgspec.json.encode(msgspec.to_builtins(job) | {"samplign": {}})
    async with MemoryBus(broker, user="mallory") as bus:
        queue = topology.jobs_queue("echo", "interactive")
        await bus.declare(topology.DEAD_LETTERS, queue)
        await bus.publish(queue.bindings[0], Message(body, JSON, reply_to="reply.mallory.1"))
        async with Subscription(bus, queue.name, prefetch=1) as subscription:
            async for item in subscription:
                if not isinstance(item, Attached | Lost):
                    delivery = JobDelivery(item, subscription)
                    break
            delivery.note_ignored_fields(job)
            replacing = as_message(job, delivery.message)

    assert replacing.headers == {"warren-ignored-fields": "samplign"}


async def test_unknown_fields_of_a_newer_gateways_jobs_are_not_reported(
    worker: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    log = topology.reply_queue("r", expires_s=30)
    await worker.declare(log)
    job = new_job("echo", PROMPT, mode="final")
    body = msgspec.msgpack.encode(msgspec.to_builtins(job) | {"newer": 1})

    async with worker.consume(log.name) as consumer:
        message = Message(body, reply_to=log.name)
        await worker.publish(topology.jobs_binding("echo", "interactive"), message)
        answer = (await anext(consumer)).message

    assert answer.headers == {}
    assert "fields ignored" not in caplog.messages
