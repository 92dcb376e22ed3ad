"""Dead letters on the in-memory bus: listed, retried and dropped."""

import re
import time

import msgspec
import pytest

from shared import dead_letters, topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from shared.errors import InvalidRequest
from shared.messages import GenerationJob, TextPrompt, decode_job, encode
from tests.support.deployment.broker import Broker

SECRET = "a prompt"


def new_job(request_id: str) -> GenerationJob:
    return GenerationJob(
        request_id=request_id,
        model="m",
        prompts=(TextPrompt(text=SECRET),),
        created_at=time.time() - 90,
        deadline=time.time() + 10,
    )


async def dead_letter(
    bus: Bus,
    body: bytes,
    lane: topology.Lane = "interactive",
    *,
    publisher: Bus | None = None,
    reply_to: str = "reply.r",
    published_at: float = 0.0,
    correlation_id: str = "c",
    message_id: str = "",
) -> None:
    """A worker rejects a message."""
    queue = topology.jobs_queue("m", lane)
    await bus.declare(topology.DEAD_LETTERS, queue)
    message = Message(
        body,
        reply_to=reply_to,
        correlation_id=correlation_id,
        message_id=message_id,
        published_at=published_at,
    )
    await (publisher or bus).publish(queue.bindings[0], message)
    async with bus.consume(queue.name) as consumer:
        await (await anext(consumer)).reject()


async def num_dead(bus: Bus) -> int:
    state = await bus.inspect(topology.DEAD_LETTERS.name)
    assert state is not None
    return state.num_ready


@pytest.mark.rabbit
async def test_a_listing_sees_what_another_one_held_until_just_now(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in ("_PATIENCE_S", "_REQUEUED_WITHIN_S"):  # too short for a busy broker
        monkeypatch.setattr(dead_letters, patience, 20.0)
    async with RabbitBus(broker.url) as bus:
        await bus.wait_connected()
        await bus.delete_queue(topology.DEAD_LETTERS.name)
        for k in range(4):
            await dead_letter(bus, encode(new_job(f"letter-{k}")))
        numbers = []
        for _ in range(12):
            async with dead_letters.opened(bus, 4) as letters:
                numbers.append(len(letters))
        await bus.delete_queue(topology.DEAD_LETTERS.name)

    assert numbers == [4] * 12


async def test_they_say_what_died_where_and_of_what() -> None:
    began = time.time()
    async with MemoryBus() as bus:
        await dead_letter(bus, encode(new_job("a")))
        await dead_letter(bus, encode(new_job("b")), "suspect")
        await dead_letter(bus, b"no job")
        async with dead_letters.opened(bus, 10) as letters:
            facts = [(letter.request_id, letter.reason, letter.queue) for letter in letters]
            ages = [letter.age_s or 0.0 for letter in letters]
    elapsed_s = time.time() - began

    assert facts == [
        ("a", "rejected", "jobs.m.interactive"),
        ("b", "rejected: its workers crashed", "jobs.m.suspect"),
        (
            "c",
            "rejected: Expected `object`, got `int`; it was read as MessagePack, because its "
            "content type is not application/json",
            "jobs.m.interactive",
        ),
    ]
    assert 90 <= round(ages[0], 3) <= 90.001 + elapsed_s
    assert 0 <= ages[2] <= 0.001 + elapsed_s


async def test_what_is_no_job_has_the_age_of_its_message() -> None:
    began = time.time()
    async with MemoryBus() as bus:
        await dead_letter(bus, b"no job", published_at=began - 3600)
        async with dead_letters.opened(bus, 10) as letters:
            age_s = letters[0].age_s or 0.0

    assert 3600 <= round(age_s, 3) <= 3600.001 + time.time() - began


async def test_what_has_no_correlation_id_has_the_id_in_its_body_or_a_stable_one() -> None:
    async with MemoryBus() as bus:
        await dead_letter(bus, encode(new_job("a")), reply_to="", correlation_id="")
        await dead_letter(bus, b"no job", correlation_id="", message_id="m-1")
        await dead_letter(bus, b"no job", correlation_id="")
        await dead_letter(bus, b"nor this", correlation_id="")
        async with dead_letters.opened(bus, 10) as letters:
            ids = [letter.request_id for letter in letters]
        async with dead_letters.opened(bus, 10) as letters:
            ids_again = [letter.request_id for letter in letters]

    assert ids[:2] == ["a", "m-1"]
    assert all(re.fullmatch("letter-[0-9a-f]{16}", one) for one in ids[2:])
    assert len(set(ids)) == 4
    assert ids_again == ids


async def test_what_is_no_job_has_the_tenant_of_its_user() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, MemoryBus(broker, user="alice") as alice:
        await dead_letter(bus, b"no job")
        await dead_letter(bus, b"no job", publisher=alice)
        async with dead_letters.opened(bus, 10) as letters:
            tenants = [letter.tenant for letter in letters]

    assert tenants == ["", "alice"]


async def test_what_is_looked_at_stays() -> None:
    async with MemoryBus() as bus:
        await dead_letter(bus, encode(new_job("a")))
        for _ in range(30):
            async with dead_letters.opened(bus, 10) as letters:
                assert len(letters) == 1
        num_left = await num_dead(bus)

    assert num_left == 1


async def test_no_more_are_held_than_are_shown() -> None:
    async with MemoryBus() as bus:
        for name in ("a", "b", "c"):
            await dead_letter(bus, encode(new_job(name)))
        async with dead_letters.opened(bus, 2) as letters:
            names = [letter.request_id for letter in letters]
            num_left = await num_dead(bus)

    assert (names, num_left) == (["a", "b"], 1)


async def test_a_retried_job_is_in_its_queue_again_without_its_deadline() -> None:
    job = new_job("a")
    async with MemoryBus() as bus:
        await dead_letter(bus, encode(job), "batch")
        async with dead_letters.opened(bus, 10) as letters:
            await dead_letters.find(letters, "a").retry(bus)
        async with bus.consume(topology.jobs_queue("m", "batch").name) as consumer:
            message = (await anext(consumer)).message
        num_left = await num_dead(bus)

    expected = msgspec.structs.replace(job, deadline=None, publication=1)
    assert decode_job(message.body) == expected
    assert (message.reply_to, message.correlation_id, num_left) == ("reply.r", "c", 0)


async def test_a_job_that_had_expired_in_the_queue_of_one_worker_can_be_tried_again() -> None:
    near, jobs = topology.near_queue("m", "worker.w"), topology.jobs_queue("m", "interactive")
    async with MemoryBus() as bus:
        await bus.declare(topology.DEAD_LETTERS, jobs, near)
        await bus.publish(near.bindings[0], Message(encode(new_job("a")), reply_to="reply.r"))
        async with bus.consume(jobs.name) as consumer:
            await (await anext(consumer)).reject()
        async with dead_letters.opened(bus, 1) as [letter]:
            died_in = letter.queue
            await letter.retry(bus)
        async with bus.consume(jobs.name) as consumer:
            job = decode_job((await anext(consumer)).message.body)

    assert died_in == near.name
    assert job.request_id == "a"


async def test_what_is_no_job_cannot_be_tried_again() -> None:
    async with MemoryBus() as bus:
        await dead_letter(bus, b"no job")
        async with dead_letters.opened(bus, 10) as letters:
            letter = dead_letters.find(letters, "c")
            with pytest.raises(InvalidRequest, match="c can only be dropped: Expected `object`"):
                await letter.retry(bus)
        num_left = await num_dead(bus)

    assert (letter.can_retry, num_left) == (False, 1)


async def test_a_job_in_the_queue_of_another_model_cannot_be_tried_again() -> None:
    job = msgspec.structs.replace(new_job("a"), model="other")
    async with MemoryBus() as bus:
        await dead_letter(bus, encode(job))
        async with dead_letters.opened(bus, 10) as letters:
            (letter,) = letters
            with pytest.raises(InvalidRequest, match="a can only be dropped: the job names"):
                await letter.retry(bus)
        num_left = await num_dead(bus)

    assert letter.reason == "rejected: the job names another model than its queue"
    assert (letter.can_retry, num_left) == (False, 1)


async def test_what_its_publisher_may_not_name_cannot_be_tried_again() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, MemoryBus(broker, user="alice") as alice:
        await dead_letter(bus, encode(new_job("a")), publisher=alice)
        async with dead_letters.opened(bus, 10) as letters:
            (letter,) = letters
            with pytest.raises(InvalidRequest):
                await letter.retry(bus)

    assert letter.reason == "rejected: request_id does not begin with alice."


async def test_a_retried_job_runs_for_its_publishers_tenant() -> None:
    job = msgspec.structs.replace(new_job("alice.a"), tenant="bob")
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, MemoryBus(broker, user="alice") as alice:
        await dead_letter(bus, encode(job), publisher=alice, reply_to="reply.alice.r")
        async with dead_letters.opened(bus, 10) as letters:
            await letters[0].retry(bus)
        async with bus.consume(topology.jobs_queue("m", "interactive").name) as consumer:
            message = (await anext(consumer)).message

    assert decode_job(message.body).tenant == "alice"


async def test_a_dropped_one_is_gone() -> None:
    async with MemoryBus() as bus:
        for name in ("a", "b"):
            await dead_letter(bus, encode(new_job(name)))
        async with dead_letters.opened(bus, 10) as letters:
            await dead_letters.find(letters, "a").drop()
        async with dead_letters.opened(bus, 10) as letters:
            names = [letter.request_id for letter in letters]

    assert names == ["b"]


async def test_an_unknown_id_is_an_error_that_names_it() -> None:
    async with MemoryBus() as bus, dead_letters.opened(bus, 10) as letters:
        with pytest.raises(InvalidRequest, match="nobody"):
            dead_letters.find(letters, "nobody")
