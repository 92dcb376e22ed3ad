"""The users of infra/rabbitmq: each may do what its role needs, and nothing else."""

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product

import aiormq
import pytest
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused, ChannelPreconditionFailed
from pamqp.commands import Basic
from yarl import URL

from infra.rabbitmq.worker_account import definitions
from shared import topology
from shared.bus.base import Binding, Bus, Exchange, Message, Queue
from shared.bus.rabbit import RabbitBus
from shared.errors import AccessRefused, BusError, StartupError
from shared.topology import Lane
from tests.support.deployment.broker import Broker, RabbitNode
from worker.process.prepared_queues import WorkerBus

pytestmark = pytest.mark.rabbit

MODEL = "permissions-test"
WORKER_ID = "permissions-test"
EXPIRES_S = 600.0
"""Longer than any test: a queue that has expired is not found, rather than refused."""


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[RabbitBus]:
    async with RabbitBus(broker.url_of("gateway")) as bus:
        gateway_id = uuid.uuid4().hex
        await bus.declare(
            topology.JOBS,
            topology.REPLIES,
            topology.gateway_queue(gateway_id),
            topology.announcements_queue(gateway_id),
        )
        yield bus


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[RabbitBus]:
    async with RabbitBus(broker.url_of("worker")) as bus:
        await topology.declare_worker(bus, MODEL, WORKER_ID)
        yield bus


@pytest.fixture
async def publisher(broker: Broker) -> AsyncIterator[RabbitBus]:
    async with RabbitBus(broker.url_of("publisher")) as bus:
        yield bus


@pytest.fixture(params=["gateway", "publisher"])
def user(request: pytest.FixtureRequest) -> str:
    """A user that publishes jobs."""
    return str(request.param)


@pytest.fixture
async def requester(user: str, broker: Broker) -> AsyncIterator[RabbitBus]:
    async with RabbitBus(broker.url_of(user)) as bus:
        yield bus


@pytest.fixture
async def reply(user: str, requester: RabbitBus) -> AsyncIterator[Queue]:
    queue = topology.reply_queue(own_name(user), EXPIRES_S)
    await requester.declare(queue)
    yield queue
    await requester.delete_queue(queue.name)


def own_name(user: str) -> str:
    """A new name that the user may give to a request."""
    name = uuid.uuid4().hex
    return name if user == "gateway" else f"{user}.{name}"


async def receive(bus: Bus, queue: str, *, is_exclusive: bool = False) -> bytes:
    async with bus.consume(queue, is_exclusive=is_exclusive) as consumer:
        delivery = await anext(consumer)
        await delivery.ack()
    return delivery.message.body


async def find(bus: Bus, queue: str, body: bytes) -> None:
    """Wait for ``body`` among the other messages that arrive in ``queue``."""
    async with bus.consume(queue) as consumer:
        async for delivery in consumer:
            if delivery.message.body == body:
                return


async def test_a_publisher_hears_who_serves(publisher: RabbitBus, worker: RabbitBus) -> None:
    queue = topology.publisher_queue(own_name("publisher"))
    await publisher.declare(queue)

    await worker.publish(topology.ANNOUNCEMENTS, Message(b"here"))

    await find(publisher, queue.name, b"here")
    await publisher.delete_queue(queue.name)


async def test_a_request_runs_from_a_job_to_its_answer(
    requester: RabbitBus, worker: RabbitBus, reply: Queue
) -> None:
    jobs = topology.jobs_queue(MODEL, "interactive")
    await requester.publish(jobs.bindings[0], Message(b"job"))
    assert await receive(worker, jobs.name) == b"job"

    await worker.publish(reply.bindings[0], Message(b"event"))
    assert await worker.inspect(reply.name) is not None
    await requester.publish(topology.worker_binding(f"worker.{WORKER_ID}"), Message(b"cancel"))

    assert await receive(requester, reply.name, is_exclusive=True) == b"event"
    assert await receive(worker, topology.worker_queue(WORKER_ID).name) == b"cancel"


async def test_a_worker_reads_a_log_that_nobody_reads(
    requester: RabbitBus, worker: RabbitBus, reply: Queue
) -> None:
    await worker.publish(reply.bindings[0], Message(b"event"))

    assert await receive(worker, reply.name, is_exclusive=True) == b"event"


async def test_a_worker_hears_its_peers(worker: RabbitBus) -> None:
    peers = topology.peers_queue(uuid.uuid4().hex)
    await worker.declare(peers)

    await worker.publish(topology.ANNOUNCEMENTS, Message(b"here"))

    await find(worker, peers.name, b"here")


async def test_a_worker_of_a_large_fleet_hears_its_group(worker: RabbitBus) -> None:
    worker_id = uuid.uuid4().hex
    group = topology.group_queue(MODEL, 4, worker_id)
    await worker.declare(group)

    await worker.publish(topology.group_binding(MODEL, 4, worker_id), Message(b"here"))

    await find(worker, group.name, b"here")


@pytest.mark.parametrize("lane", topology.LANES)
async def test_a_worker_publishes_a_job_again(worker: RabbitBus, lane: Lane) -> None:
    jobs = topology.jobs_queue(MODEL, lane)

    await worker.publish(jobs.bindings[0], Message(b"again"))

    assert await receive(worker, jobs.name) == b"again"


async def test_a_worker_moves_a_job_to_those_with_its_numerics(worker: RabbitBus) -> None:
    resumed = topology.resumed_queue(MODEL, "cpu")
    await worker.declare(resumed)

    await worker.publish(resumed.bindings[0], Message(b"moved"))

    assert await receive(worker, resumed.name) == b"moved"


async def test_a_gateway_prefers_a_worker_whose_jobs_return_to_all(
    gateway: RabbitBus, worker: RabbitBus
) -> None:
    jobs, near = topology.jobs_queue(MODEL, "interactive"), make_near_queue()
    await worker.declare(near)
    async with worker.consume(near.name) as consumer:
        await gateway.publish(near.bindings[0], Message(b"near"))
        delivery = await anext(consumer)
        await delivery.ack()

    await gateway.publish(near.bindings[0], Message(b"not taken"))

    assert delivery.message.body == b"near"
    assert await receive(worker, jobs.name) == b"not taken"


def make_near_queue() -> Queue:
    return topology.near_queue(MODEL, f"worker.{uuid.uuid4().hex}")


async def test_a_worker_rejects_to_the_dead_letters(gateway: RabbitBus, worker: RabbitBus) -> None:
    jobs, body = topology.jobs_queue(MODEL, "batch"), uuid.uuid4().bytes
    await gateway.publish(jobs.bindings[0], Message(body))
    async with worker.consume(jobs.name) as consumer:
        await (await anext(consumer)).reject()

    await find(worker, topology.DEAD_LETTERS.name, body)


@pytest.mark.parametrize("lane", topology.LANES)
async def test_a_gateway_retries_dead_letters(
    gateway: RabbitBus, worker: RabbitBus, lane: Lane
) -> None:
    jobs, body = topology.jobs_queue(MODEL, lane), uuid.uuid4().bytes
    await worker.publish(topology.DEAD_LETTERS.bindings[0], Message(body))

    await find(gateway, topology.DEAD_LETTERS.name, body)
    await gateway.publish(jobs.bindings[0], Message(body))

    assert await receive(worker, jobs.name) == body


async def test_gateways_hear_workers_and_each_other(gateway: RabbitBus, worker: RabbitBus) -> None:
    announcements, commands = (make("x") for make in (announcements_queue, gateway_queue))
    await gateway.declare(announcements, commands)

    await worker.publish(topology.ANNOUNCEMENTS, Message(b"here"))
    await gateway.publish(topology.ALL_GATEWAYS, Message(b"release"))

    await find(gateway, announcements.name, b"here")
    await find(gateway, commands.name, b"release")


def announcements_queue(suffix: str) -> Queue:
    return topology.announcements_queue(f"{uuid.uuid4().hex}-{suffix}")


def gateway_queue(suffix: str) -> Queue:
    return topology.gateway_queue(f"{uuid.uuid4().hex}-{suffix}")


async def test_gateways_hear_of_the_use_of_keys(gateway: RabbitBus, worker: RabbitBus) -> None:
    queue = topology.usage_queue(uuid.uuid4().hex)
    await gateway.declare(queue)

    await gateway.publish(topology.USAGE, Message(b"used"))
    await worker.publish(topology.USAGE, Message(b"ended"))

    await find(gateway, queue.name, b"used")
    await find(gateway, queue.name, b"ended")


async def test_a_gateway_writes_into_the_log_of_its_request(gateway: RabbitBus) -> None:
    queue = topology.reply_queue(uuid.uuid4().hex, EXPIRES_S)
    await gateway.declare(queue)

    await gateway.publish(queue.bindings[0], Message(b"accepted"))

    assert await receive(gateway, queue.name) == b"accepted"
    await gateway.delete_queue(queue.name)


JOBS = topology.jobs_queue(MODEL, "interactive")
OWN_QUEUES = {"gateway": "reply.stolen", "publisher": "reply.publisher.stolen", "worker": "jobs.x"}
"""A queue of each user, to which it may bind what it may read."""
WILDCARDS = ("#", "*", "*.*", "reply.#", "reply.*", "reply.publisher.*", "worker.#", "worker.*")
EXCHANGES = [value for value in vars(topology).values() if isinstance(value, Exchange)]
WITHOUT_PATTERNS = {
    *((user, topology.WORKERS) for user in OWN_QUEUES),
    *(("worker", exchange) for exchange in (topology.JOBS, topology.SUSPECTS, topology.DEAD)),
    *((user, topology.LEDGER) for user in ("gateway", "worker")),
    ("gateway", topology.USAGE_REPORTS),
    ("worker-limited", topology.WORKERS),
}
"""What each user may read of the exchanges for which wildcards have no meaning."""
Act = Callable[[Bus], Awaitable[object]]


def publishing(binding: Binding) -> Act:
    return lambda bus: bus.publish(binding, Message(b"forged"))


def declaring(queue: Queue | Exchange) -> Act:
    return lambda bus: bus.declare(queue)


def consuming(queue: str) -> Act:
    return lambda bus: receive(bus, queue)


def deleting(queue: str) -> Act:
    return lambda bus: bus.delete_queue(queue)


def binding(user: str, *bindings: Binding) -> Act:
    """Bind a queue of the user's own."""
    return declaring(Queue(OWN_QUEUES[user], bindings, expires_s=EXPIRES_S))


NEW_EXCHANGE = declaring(Exchange("warren.other", "direct"))
NEW_QUEUE = declaring(Queue("other"))
FORGED_SUSPECT = publishing(topology.jobs_binding(MODEL, "suspect"))
FORGED_EVENT = publishing(topology.reply_binding("reply.x"))
FORGED_ANNOUNCEMENT = publishing(topology.ANNOUNCEMENTS)
FORGED_RELEASE = publishing(topology.ALL_GATEWAYS)
OTHERS = topology.reply_queue("someone.x", EXPIRES_S)
"""A reply queue of another publisher."""
A_WORKERS_COMMANDS = topology.worker_binding(f"worker.{WORKER_ID}")


@pytest.mark.parametrize(
    "act",
    [
        consuming(JOBS.name),
        deleting(JOBS.name),
        declaring(JOBS),
        binding("gateway", *JOBS.bindings),
        declaring(make_near_queue()),
        binding("gateway", A_WORKERS_COMMANDS),
        binding("gateway", topology.reply_binding("reply.publisher.x")),
        declaring(topology.reply_queue("publisher.x", EXPIRES_S)),
        deleting(topology.DEAD_LETTERS.name),
        FORGED_ANNOUNCEMENT,
        NEW_EXCHANGE,
        NEW_QUEUE,
    ],
)
async def test_a_gateway_may_not(worker: RabbitBus, gateway: RabbitBus, act: Act) -> None:
    with pytest.raises(AccessRefused):
        await act(gateway)


@pytest.mark.parametrize(
    "act",
    [
        FORGED_RELEASE,
        publishing(A_WORKERS_COMMANDS),
        declaring(topology.reply_queue("x", EXPIRES_S)),
        deleting("reply.x"),
        binding("worker", topology.reply_binding("reply.x")),
        binding("worker", topology.USAGE),
        declaring(topology.gateway_queue("x")),
        NEW_EXCHANGE,
        NEW_QUEUE,
    ],
)
async def test_a_worker_may_not(broker: Broker, worker: RabbitBus, act: Act) -> None:
    async with RabbitBus(broker.url) as operator:
        reply = topology.reply_queue("x", EXPIRES_S)
        await operator.declare(reply)
        with pytest.raises(AccessRefused):
            await act(worker)
        await operator.delete_queue(reply.name)


@pytest.mark.parametrize(
    "act",
    [
        consuming(JOBS.name),
        deleting(JOBS.name),
        consuming(OTHERS.name),
        deleting(OTHERS.name),
        declaring(OTHERS),
        declaring(topology.reply_queue("x", EXPIRES_S)),
        binding("publisher", *JOBS.bindings),
        binding("publisher", *OTHERS.bindings),
        binding("publisher", topology.reply_binding("reply.x")),
        binding("publisher", A_WORKERS_COMMANDS),
        binding("publisher", topology.ALL_GATEWAYS),
        binding("publisher", topology.USAGE),
        publishing(topology.USAGE),
        FORGED_SUSPECT,
        FORGED_EVENT,
        FORGED_ANNOUNCEMENT,
        FORGED_RELEASE,
        declaring(topology.announcements_queue("x")),
        NEW_EXCHANGE,
        NEW_QUEUE,
    ],
)
async def test_a_publisher_may_not(
    broker: Broker, worker: RabbitBus, publisher: RabbitBus, act: Act
) -> None:
    async with RabbitBus(broker.url) as operator:
        await operator.declare(OTHERS)
        with pytest.raises(AccessRefused):
            await act(publisher)
        await operator.delete_queue(OTHERS.name)


async def test_a_publisher_learns_the_length_of_a_queue_whose_name_it_has(
    broker: Broker, gateway: RabbitBus, worker: RabbitBus
) -> None:
    await gateway.publish(JOBS.bindings[0], Message(b"job"))

    async with opened_channel(broker.url_of("publisher")) as channel:
        found = await channel.queue_declare(JOBS.name, passive=True)

    assert await receive(worker, JOBS.name) == b"job"
    assert (found.message_count, found.consumer_count) == (1, 0)


LIMITED = "worker-limited"
LIMITED_MODELS = ["limited-3.1", "limited-b"]
OWN_COMMANDS = topology.worker_queue("limited")


@pytest.fixture(scope="module")
def limited_url(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a worker's user that can serve only `LIMITED_MODELS`."""
    if not isinstance(broker, RabbitNode):
        pytest.skip("the broker is not this session's own")
    account = tmp_path_factory.mktemp("limited") / "account.json"
    account.write_text(json.dumps(definitions(LIMITED, LIMITED_MODELS, "warren")))
    broker.ctl("add_user", LIMITED, str(URL(broker.url).password))
    broker.ctl("import_definitions", str(account))
    return broker.url_of(LIMITED)


@pytest.fixture
async def limited(limited_url: str) -> AsyncIterator[WorkerBus]:
    async with WorkerBus(limited_url) as bus:
        yield bus


@pytest.mark.parametrize("model", LIMITED_MODELS)
async def test_a_limited_worker_serves_its_models(
    limited: WorkerBus, gateway: RabbitBus, worker: RabbitBus, model: str
) -> None:
    await topology.declare_worker(worker, model, "unlimited")  # whose queues are the same
    await topology.declare_worker(limited, model, "limited")
    await limited.declare(topology.peers_queue("limited"))
    reply = topology.reply_queue(uuid.uuid4().hex, EXPIRES_S)
    await gateway.declare(reply)

    for lane in ("interactive", "batch", "quick"):
        jobs = topology.jobs_queue(model, lane)
        await gateway.publish(jobs.bindings[0], Message(b"job"))
        assert await receive(limited, jobs.name) == b"job"
    suspect = topology.jobs_queue(model, "suspect")
    await limited.publish(suspect.bindings[0], Message(b"again"))
    assert await receive(limited, suspect.name) == b"again"
    await limited.publish(topology.ANNOUNCEMENTS, Message(b"here"))
    await limited.publish(reply.bindings[0], Message(b"event"))
    assert await receive(limited, reply.name, is_exclusive=True) == b"event"
    await gateway.publish(topology.worker_binding("worker.limited"), Message(b"cancel"))
    assert await receive(limited, OWN_COMMANDS.name) == b"cancel"
    await gateway.delete_queue(reply.name)


async def test_a_limited_workers_rejected_job_is_a_dead_letter(
    limited: WorkerBus, gateway: RabbitBus
) -> None:
    jobs, body = topology.jobs_queue(LIMITED_MODELS[0], "batch"), uuid.uuid4().bytes
    await gateway.publish(jobs.bindings[0], Message(body))
    async with limited.consume(jobs.name) as consumer:
        await (await anext(consumer)).reject()

    await find(gateway, topology.DEAD_LETTERS.name, body)


def binding_own(*bindings: Binding) -> Act:
    return declaring(Queue(OWN_COMMANDS.name, bindings, is_exclusive=True))


@pytest.mark.parametrize(
    "act",
    [
        consuming(JOBS.name),
        deleting(JOBS.name),
        declaring(topology.jobs_queue("new", "interactive")),
        deleting(topology.jobs_queue(LIMITED_MODELS[0], "interactive").name),
        consuming(topology.DEAD_LETTERS.name),
        consuming(topology.LEDGER_RECORDS.name),
        binding_own(*JOBS.bindings),
        binding_own(topology.jobs_binding(MODEL, "suspect")),
        binding_own(*topology.DEAD_LETTERS.bindings),
        binding_own(*topology.LEDGER_RECORDS.bindings),
        binding_own(topology.reply_binding("reply.x")),
        binding_own(topology.USAGE),
        binding_own(topology.worker_binding("worker.#")),
        publishing(A_WORKERS_COMMANDS),
        publishing(topology.DEAD_LETTERS.bindings[0]),
        FORGED_RELEASE,
        NEW_EXCHANGE,
        NEW_QUEUE,
    ],
)
async def test_a_limited_worker_may_not(worker: RabbitBus, limited: WorkerBus, act: Act) -> None:
    with pytest.raises(AccessRefused):
        await act(limited)


async def are_refused(new_act: Callable[[str], Act], bus: Bus) -> dict[str, bool]:
    """Of each wildcard: whether the user may not bind it."""
    refused = {}
    for key in WILDCARDS:
        try:
            await new_act(key)(bus)
            refused[key] = False
        except AccessRefused:
            refused[key] = True
    return refused


ALL_ARE_REFUSED = dict.fromkeys(WILDCARDS, True)


def test_patterns_mean_nothing_to_the_exchanges_that_some_may_bind_at_will() -> None:
    assert [exchange for _, exchange in WITHOUT_PATTERNS if exchange.kind == "topic"] == []


@pytest.mark.parametrize(
    ("user", "exchange"),
    [pair for pair in product(OWN_QUEUES, EXCHANGES) if pair not in WITHOUT_PATTERNS],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
async def test_nobody_binds_patterns(
    broker: Broker, worker: RabbitBus, user: str, exchange: Exchange
) -> None:
    async with RabbitBus(broker.url_of(user)) as bus:
        refused = await are_refused(lambda key: binding(user, Binding(exchange, key)), bus)

    assert refused == ALL_ARE_REFUSED


@pytest.mark.parametrize(
    "exchange",
    [exchange for exchange in EXCHANGES if exchange != topology.WORKERS],
    ids=lambda exchange: exchange.name,
)
async def test_a_limited_worker_binds_no_patterns(limited: WorkerBus, exchange: Exchange) -> None:
    refused = await are_refused(lambda key: binding_own(Binding(exchange, key)), limited)

    assert refused == ALL_ARE_REFUSED


@pytest.mark.parametrize("source", [topology.REPLIES, topology.CONTROL], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("user", "destination"),
    [("gateway", topology.JOBS), ("publisher", topology.JOBS), ("worker", topology.SUSPECTS)],
)
async def test_nobody_binds_patterns_between_exchanges(
    broker: Broker, user: str, destination: Exchange, source: Exchange
) -> None:
    async with opened_connection(broker.url_of(user)) as connection:
        for key in WILDCARDS:
            channel = await connection.channel()  # which a refusal closes
            with pytest.raises(ChannelAccessRefused):
                await channel.exchange_bind(
                    destination=destination.name, source=source.name, routing_key=key
                )


@pytest.mark.parametrize("name", ["jobs.own", "control.worker.own"])
async def test_a_worker_commands_nobody_through_an_exchange_of_its_own(
    broker: Broker, name: str
) -> None:
    async with opened_channel(broker.url_of("worker")) as channel:
        await channel.exchange_declare(name, exchange_type="fanout", auto_delete=True)
        with pytest.raises(ChannelAccessRefused):
            await channel.exchange_bind(destination=topology.CONTROL.name, source=name)
    async with opened_channel(broker.url_of("worker")) as channel:
        await channel.exchange_delete(name)


@pytest.mark.parametrize("user", OWN_QUEUES)
async def test_nobody_publishes_in_anothers_name(
    broker: Broker, worker: RabbitBus, user: str
) -> None:
    other = "worker" if user == "gateway" else "gateway"
    async with opened_channel(broker.url_of(user)) as channel:
        with pytest.raises(ChannelPreconditionFailed, match="user_id"):
            await channel.basic_publish(
                b"forged",
                exchange=topology.JOBS.name,
                routing_key=JOBS.bindings[0].routing_key,
                properties=Basic.Properties(user_id=other),
            )


@asynccontextmanager
async def opened_connection(url: str) -> AsyncIterator[AbstractConnection]:
    connection = await aiormq.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def opened_channel(url: str) -> AsyncIterator[AbstractChannel]:
    async with opened_connection(url) as connection:
        yield await connection.channel()


@pytest.mark.parametrize("user", ["gateway", "worker", "publisher"])
async def test_nobody_goes_around_the_exchanges(
    broker: Broker, worker: RabbitBus, user: str
) -> None:
    async with RabbitBus(broker.url_of(user)) as bus:
        with pytest.raises(BusError):
            await bus.publish(Binding(Exchange("", "direct"), JOBS.name), Message(b"forged"))
    state = await worker.inspect(JOBS.name)
    assert state is not None
    assert state.num_ready == 0


async def test_there_is_no_guest(broker: Broker) -> None:
    with pytest.raises(StartupError):
        async with RabbitBus(broker.url_of("guest")):
            pass
