"""Behaviour of the bus that only a real broker and a real network can cause."""

import asyncio
import gc
import logging
import os
import random
import ssl
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from aiormq import Channel
from yarl import URL

from shared import topology
from shared.bus.base import Message, Queue
from shared.bus.rabbit import RabbitBus, link
from shared.bus.rabbit import bus as rabbit_bus_module
from shared.bus.rabbit.channel_consumer import RabbitDelivery
from shared.bus.rabbit.channels import Resources
from shared.bus.rabbit.link import Link
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.errors import (
    BusUnavailable,
    PublishersBlocked,
    PublishUnconfirmed,
    QueueNotFound,
    StartupError,
    TooManyQueues,
    Unanswered,
    Unroutable,
)
from shared.telemetry import incidents
from tests.shared.bus.deliveries import (
    eventually,
    numbered,
    publish,
    take,
    take_bodies,
    take_to_the_end,
)
from tests.shared.bus.wires import QueueMaker, connected_to, queue_maker
from tests.support.deployment.broker import ROOT_VARIABLE, Broker, RabbitNode
from tests.support.deployment.processes import free_port
from tests.support.network.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.rabbit, pytest.mark.usefixtures("patient_calls")]

PASSWORD = "a-secret-that-must-not-leak"
TIMEOUT_S = 5.0
LOGIN_S = 60.0
"""How long a busy broker may take to refuse a login."""
NUM_CHANNELS = 16
LIMIT_CHANNELS = "application:set_env(rabbit, channel_max, %d)"
DEFAULT_CHANNELS = 2047
CLOSE_CONNECTIONS = 'rabbit_networking:close_connections(rabbit_networking:connections(), "test")'
BLOCK_PUBLISHERS = (
    "ok = vm_memory_monitor:set_vm_memory_high_watermark(0.0), [_ | _] = rabbit_alarm:get_alarms()"
)
"""Connections have been told of an alarm that is listed."""
LET_PUBLISH = "ok = vm_memory_monitor:set_vm_memory_high_watermark(0.6)"
FORBID_QUEUES = (
    'ok = rabbit_vhost_limit:parse_set(<<"warren">>, <<"{\\"max-queues\\": 0}">>, <<"test">>)'
)
ALLOW_QUEUES = 'ok = rabbit_vhost_limit:clear(<<"warren">>, <<"test">>)'
CHANNELS = "lists:sort(rabbit_channel:list())"
FORGET = (
    'Name = rabbit_misc:r(<<"warren">>, queue, <<"%s">>),'
    " case erlang:function_exported(rabbit_db_queue, delete, 2) of"
    " true -> rabbit_db_queue:delete(Name, normal);"
    ' false -> rabbit_amqqueue:internal_delete(Name, <<"test">>) end.'
)
"""Delete the record of a queue, while its process lives: nobody is told."""
UNBIND = (
    'Name = rabbit_misc:r(<<"warren">>, queue, <<"%s">>),'
    ' [rabbit_binding:remove(Binding, fun(_, _) -> ok end, <<"test">>)'
    " || Binding <- rabbit_binding:list_for_destination(Name),"
    " element(4, element(2, Binding)) =/= <<>>]."
)
"""Remove a queue's bindings, except that of the default exchange."""
TAKE_BINDINGS = """
Bindings = [Binding
    || Binding <- rabbit_binding:list_for_destination(rabbit_misc:r(<<"warren">>, queue, <<"%s">>)),
    element(4, element(2, Binding)) =/= <<>>],
[begin
    [catch mnesia:dirty_delete(Table, Binding)
        || Table <- [rabbit_route, rabbit_semi_durable_route]],
    catch mnesia:dirty_delete(rabbit_reverse_route, {reverse_binding, Queue, Key, Exchange, Args})
end || Binding = {binding, Exchange, Key, Queue, Args} <- Bindings],
io:format("~p.", [Bindings]).
"""
"""Delete the records of a queue's bindings as RabbitMQ does first, and print them."""
UNBIND_LATE = """
mnesia:transaction(fun() ->
    rabbit_exchange_type_topic:remove_bindings(transaction, none, %s) end).
"""
"""What RabbitMQ does some time later with such bindings of topic exchanges."""
WRITE_REGISTER = (
    "#{names := #{directory_rev := Register}} = ra_system:fetch(quorum_queues),"
    " ok = dets:sync(Register)."
)
"""RabbitMQ writes the register of its quorum queues, unlike their messages, with a delay of some
seconds: a younger queue has no leader after a kill."""


with_mnesia = pytest.mark.skipif(
    ROOT_VARIABLE in os.environ, reason="Khepri deletes a queue and its bindings in one transaction"
)


@pytest.fixture
def node(broker: Broker) -> RabbitNode:
    """The broker, for tests that disturb it."""
    assert isinstance(broker, RabbitNode)
    return broker


@pytest.fixture
async def proxy(broker: Broker) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(broker.url) as proxy:
        yield proxy


@pytest.mark.breaks_broker
async def test_a_connection_that_the_broker_closes_comes_back(
    node: RabbitNode, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue, command_queue = make_rabbit_queue(), make_rabbit_queue(is_exclusive=True)
    await rabbit_bus.declare(queue, command_queue)
    await publish(rabbit_bus, queue, numbered(2))
    was_settled = rabbit_bus.is_settled

    async with rabbit_bus.consume(queue.name) as consumer:
        await take(consumer, 2)
        await asyncio.to_thread(node.evaluate, CLOSE_CONNECTIONS)
        with pytest.raises(BusUnavailable):
            await take_to_the_end(consumer)
    await rabbit_bus.wait_connected()
    assert (was_settled, rabbit_bus.is_settled) == (True, False)  # others may take longer

    await publish(rabbit_bus, command_queue, [b"command"])
    async with rabbit_bus.consume(command_queue.name) as consumer:
        assert await take_bodies(consumer, 1) == [b"command"]
    async with rabbit_bus.consume(queue.name) as consumer:
        returned = await take(consumer, 2)
    assert [delivery.message.body for delivery in returned] == numbered(2)


@pytest.mark.breaks_broker
async def test_an_exclusive_queue_that_the_broker_forgets_is_declared_again(
    node: RabbitNode, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue(is_exclusive=True)
    num_lost = incidents.num_reported("channel")
    await rabbit_bus.declare(queue)

    async with Subscription(rabbit_bus, queue.name, declare=(queue,)) as subscription:
        assert isinstance(await anext(subscription), Attached)
        await asyncio.to_thread(node.evaluate, FORGET % queue.name)
        assert isinstance(await anext(subscription), Lost)
        assert isinstance(await anext(subscription), Attached)
        await publish(rabbit_bus, queue, numbered(1))
        delivery = await anext(subscription)

    assert isinstance(delivery, RabbitDelivery)
    assert [delivery.message.body] == numbered(1)
    assert incidents.num_reported("channel") == num_lost + 1


@pytest.mark.breaks_broker
async def test_an_exclusive_queue_is_bound_again(
    node: RabbitNode, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue(is_exclusive=True)
    await rabbit_bus.declare(queue)
    removed = await asyncio.to_thread(node.evaluate, UNBIND % queue.name)
    assert removed.strip() == "[ok]"

    async def is_bound() -> bool:
        with suppress(Unroutable):
            await publish(rabbit_bus, queue, numbered(1))
            return True
        return False

    await eventually(is_bound)


async def test_a_node_that_does_not_answer_is_left(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbit_bus_module, "_LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(Resources, "bind_queue", never)
    num_before = incidents.num_reported("connection")
    urls = f"{broker.url},{broker.url.replace('127.0.0.1', 'localhost')}"
    async with RabbitBus(urls, timeout_s=0.5) as bus:

        async def is_declared() -> bool:
            with suppress(BusUnavailable):  # the node may take longer than the bus waits for it
                await bus.declare(Queue(f"test.{uuid.uuid4().hex}", is_exclusive=True))
                return True
            return False

        await eventually(is_declared)

        async def is_another() -> bool:
            return bus.is_connected and not bus.is_settled

        await eventually(is_another)

    assert incidents.num_reported("connection") > num_before


async def never(_: Resources, __: Queue) -> None:
    """A node without a majority answers no call that changes its store."""
    await asyncio.Event().wait()


async def take_bindings(node: RabbitNode, queue: Queue) -> str:
    """Delete the records of a queue's bindings; returns them as a term of Erlang."""
    printed = await asyncio.to_thread(node.evaluate, TAKE_BINDINGS % queue.name)
    return printed.rpartition(".")[0]


@with_mnesia
@pytest.mark.breaks_broker
async def test_the_end_of_the_last_connection_cannot_unbind_an_exclusive_queue(
    node: RabbitNode, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue(topology.CONTROL, is_exclusive=True)
    await rabbit_bus.declare(queue)
    bindings = await take_bindings(node, queue)

    async with rabbit_bus.consume(queue.name) as consumer:
        await asyncio.to_thread(node.evaluate, CLOSE_CONNECTIONS)
        with pytest.raises(BusUnavailable):
            await take_to_the_end(consumer)
    await rabbit_bus.wait_connected()
    await asyncio.to_thread(node.evaluate, UNBIND_LATE % bindings)

    await publish(rabbit_bus, queue, numbered(1))
    async with rabbit_bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 1) == numbered(1)


@with_mnesia
@pytest.mark.breaks_broker
async def test_the_end_of_a_lost_queue_cannot_unbind_the_one_declared_in_its_place(
    node: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the bus may notice the loss first, and reopen its connection.
    monkeypatch.setattr(rabbit_bus_module, "_LOOK_INTERVAL_S", 3600)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connected_to(node.url))
        queue = queue_maker(bus, stack)(topology.CONTROL, is_exclusive=True)
        await bus.declare(queue)
        bindings = await take_bindings(node, queue)

        await asyncio.to_thread(node.evaluate, FORGET % queue.name)
        await bus.declare(queue)
        await asyncio.to_thread(node.evaluate, UNBIND_LATE % bindings)

        await publish(bus, queue, numbered(1))
        async with bus.consume(queue.name) as consumer:
            assert await take_bodies(consumer, 1) == numbered(1)


async def test_a_consumer_asks_nothing_about_a_queue_that_its_own_bus_deletes(
    node: RabbitNode,
) -> None:
    async with connected_to(node.url) as bus, AsyncExitStack() as stack:
        queue = queue_maker(bus, stack)()
        await bus.declare(queue)
        async with bus.consume(queue.name) as consumer:
            channels = await asyncio.to_thread(node.evaluate, CHANNELS)

            await bus.delete_queue(queue.name)
            with pytest.raises(QueueNotFound):
                await anext(consumer)

            # The broker closes the channel on which it is asked about a queue that is gone.
            assert await asyncio.to_thread(node.evaluate, CHANNELS) == channels


async def test_a_connection_may_end_before_an_acknowledgement_is_on_its_way(
    proxy: TcpProxy,
    rabbit_bus: RabbitBus,
    make_rabbit_queue: QueueMaker,
    recwarn: pytest.WarningsRecorder,
) -> None:
    gc.collect()  # what earlier tests have left gives its warnings now
    recwarn.clear()
    queue = make_rabbit_queue()
    await rabbit_bus.declare(queue)
    await publish(rabbit_bus, queue, numbered(1))
    async with (
        connected_to(proxy.url, timeout_s=TIMEOUT_S) as bus,
        bus.consume(queue.name, prefetch=1) as consumer,
    ):
        [delivery] = await take(consumer)
        proxy.sever()
        await delivery.ack()

    async with rabbit_bus.consume(queue.name) as consumer_again:
        assert await take_bodies(consumer_again, 1) == numbered(1)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


async def test_the_acknowledgements_of_one_turn_settle_each_its_own_delivery(
    rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue()
    await rabbit_bus.declare(queue)
    await publish(rabbit_bus, queue, numbered(9))

    async with rabbit_bus.consume(queue.name) as consumer:
        deliveries = await take(consumer, 9)
        for delivery in reversed(deliveries[::2]):
            await delivery.ack()
        await deliveries[1].reject()
    await deliveries[3].ack()  # too late: it has returned

    async with rabbit_bus.consume(queue.name) as consumer:
        assert await take_bodies(consumer, 3) == numbered(9)[3::2]
    assert await rabbit_bus.inspect(queue.name) is not None


@pytest.mark.breaks_broker
async def test_confirmed_messages_survive_a_broker_that_is_killed(
    node: RabbitNode, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    jobs, log = make_rabbit_queue(kind="quorum"), make_rabbit_queue(expires_s=3600)
    await rabbit_bus.declare(jobs, log)
    for queue in (jobs, log):
        await publish(rabbit_bus, queue, numbered(50))
    await asyncio.to_thread(node.evaluate, WRITE_REGISTER)

    node.kill()
    await eventually(lambda: is_disconnected(rabbit_bus))
    await asyncio.to_thread(node.start)
    await rabbit_bus.wait_connected()

    for queue in (jobs, log):
        async with rabbit_bus.consume(queue.name) as consumer:
            assert await take_bodies(consumer, 50) == numbered(50)


async def test_nothing_waits_longer_than_the_timeout_on_a_dead_network(
    proxy: TcpProxy, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue()
    # A busy broker may take seconds for the calls before. Without the heartbeat, which would end
    # the connection meanwhile, nothing but the timeout ends a call.
    async with connected_to(f"{proxy.url}?heartbeat=600", timeout_s=TIMEOUT_S) as bus:
        await rabbit_bus.declare(queue)
        await publish(bus, queue, numbered(8))
        async with bus.consume(queue.name) as consumer:
            [delivery, *_] = await take(consumer, 8)
            proxy.stall()
            outcomes = await asyncio.gather(
                publish(bus, queue, [b"y"]),
                bus.inspect(queue.name),
                bus.declare(queue),
                return_exceptions=True,
            )
            await delivery.ack()

    assert [type(outcome) for outcome in outcomes] == [PublishUnconfirmed, Unanswered, Unanswered]


async def test_publishes_do_not_accumulate_while_nobody_reads_them(
    proxy: TcpProxy,
    rabbit_bus: RabbitBus,
    make_rabbit_queue: QueueMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_MAX_UNREAD_BYTES", 1 << 20)
    queue = make_rabbit_queue()
    large = [bytes([k]) * (1 << 20) for k in range(24)]  # more than the buffers of the sockets take
    url = f"{proxy.url}?heartbeat=600"
    await rabbit_bus.declare(queue)
    async with connected_to(url, timeout_s=2.0, num_confirm_channels=1) as bus:

        async def is_published(body: bytes) -> bool:
            """A busy broker may take longer than the bus waits, and has the message twice then."""
            with suppress(BusUnavailable, PublishUnconfirmed):
                await publish(bus, queue, [body])
                return True
            return False

        await eventually(lambda: is_published(b"first"))
        proxy.stall()
        publishes = [asyncio.create_task(publish(bus, queue, [body])) for body in large]
        await asyncio.wait(publishes)

        with pytest.raises(BusUnavailable, match="blocked"):
            await publish(bus, queue, [b"not sent"])
        assert bus.is_blocked

        proxy.resume()
        await eventually(lambda: is_published(b"last"))
    assert {type(each.exception()) for each in publishes} == {PublishUnconfirmed}
    bodies: dict[bytes, None] = {}
    async with rabbit_bus.consume(queue.name) as consumer:
        while b"last" not in bodies:
            bodies |= dict.fromkeys(await take_bodies(consumer, 1))
    assert list(bodies) == [b"first", *large, b"last"]


@pytest.mark.breaks_broker
async def test_publishes_do_not_accumulate_while_the_broker_is_short_of_memory(
    node: RabbitNode, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue()
    async with connected_to(node.url, timeout_s=TIMEOUT_S, num_confirm_channels=1) as bus:
        await bus.declare(queue)
        await asyncio.to_thread(node.evaluate, BLOCK_PUBLISHERS)
        try:
            first = asyncio.create_task(publish(bus, queue, [b"first"]))
            await eventually(lambda: is_blocked(bus))
            num_tasks = len(asyncio.all_tasks())
            outcomes = await asyncio.gather(
                *(publish(bus, queue, [b"later"]) for _ in range(3)), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [PublishersBlocked] * 3
            assert len(asyncio.all_tasks()) <= num_tasks
            with pytest.raises(PublishUnconfirmed):
                await first
        finally:  # the tests that follow have the same broker
            await asyncio.to_thread(node.evaluate, LET_PUBLISH)
        async with bus.consume(queue.name) as consumer:
            assert await take_bodies(consumer, 1) == [b"first"]


@pytest.mark.breaks_broker
async def test_consumers_and_calls_share_the_few_channels_that_a_broker_allows(
    node: RabbitNode, make_rabbit_queue: QueueMaker
) -> None:
    queues = [make_rabbit_queue() for _ in range(24)]
    await asyncio.to_thread(node.evaluate, LIMIT_CHANNELS % NUM_CHANNELS)
    try:
        async with connected_to(node.url) as bus, AsyncExitStack() as stack:
            await bus.declare(*queues)
            await asyncio.gather(
                *(stack.enter_async_context(bus.consume(queue.name)) for queue in queues)
            )
            states = await asyncio.gather(*(bus.inspect(queue.name) for queue in queues))
    finally:
        await asyncio.to_thread(node.evaluate, LIMIT_CHANNELS % DEFAULT_CHANNELS)

    assert [state is not None and state.num_consumers for state in states] == [1] * 24


@pytest.mark.breaks_broker
async def test_a_queue_beyond_the_brokers_limit_is_refused_by_name(
    node: RabbitNode, make_rabbit_queue: QueueMaker
) -> None:
    await asyncio.to_thread(node.evaluate, FORBID_QUEUES)
    try:
        async with connected_to(node.url) as bus:
            with pytest.raises(TooManyQueues, match="queue limit in vhost 'warren'"):
                await bus.declare(make_rabbit_queue())
    finally:
        await asyncio.to_thread(node.evaluate, ALLOW_QUEUES)


async def test_consumers_spread_over_as_many_connections_as_they_need(
    broker: Broker, make_rabbit_queue: QueueMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nums_channels: list[int] = []

    async def open_channel(link: Link, *, confirms: bool = False, waits: bool = True) -> Channel:
        channel = await original(link, confirms=confirms, waits=waits)
        nums_channels.append(link.num_channels)
        return channel

    original = Link.open_channel
    monkeypatch.setattr(Link, "open_channel", open_channel)
    async with (
        connected_to(broker.url, max_channels=3, num_confirm_channels=1) as bus,
        AsyncExitStack() as stack,
    ):
        queues = [make_rabbit_queue() for _ in range(10)]
        await bus.declare(*queues)
        opening = (stack.enter_async_context(bus.consume(queue.name)) for queue in queues)
        consumers = await asyncio.gather(*opening)

        for queue in queues:
            await publish(bus, queue, [queue.name.encode()])
        bodies = [await take_bodies(consumer, 1) for consumer in consumers]

    assert bodies == [[queue.name.encode()] for queue in queues]
    assert max(nums_channels) == 3


@pytest.mark.breaks_broker
async def test_channel_numbers_stay_within_the_brokers_limit(node: RabbitNode) -> None:
    link = Link([URL(node.url)], name="test", timeout_s=5)
    await asyncio.to_thread(node.evaluate, LIMIT_CHANNELS % NUM_CHANNELS)
    try:
        await link.open()
        await link.wait_connected()
        previous = await link.open_channel()
        numbers = set()
        for _ in range(3 * NUM_CHANNELS):
            channel = await link.open_channel()
            numbers.add(channel.number)
            await previous.close()
            previous = channel
        assert link.is_connected
    finally:
        await link.close()
        await asyncio.to_thread(node.evaluate, LIMIT_CHANNELS % DEFAULT_CHANNELS)

    assert numbers == set(range(1, NUM_CHANNELS + 1))


async def test_a_broker_that_is_not_there_yet_is_waited_for(broker: Broker) -> None:
    port = free_port()
    late = str(URL(broker.url).with_host("127.0.0.1").with_port(port))
    async with RabbitBus(late) as bus:
        with pytest.raises(BusUnavailable):
            await bus.inspect("anything")
        async with TcpProxy(broker.url, port=port):
            await bus.wait_connected()
            assert await bus.inspect("test.nothing") is None


async def test_a_connection_moves_on_when_its_node_dies_and_is_back_at_once(
    broker: Broker,
) -> None:
    async with AsyncExitStack() as nodes:
        proxies = [await nodes.enter_async_context(TcpProxy(broker.url)) for _ in range(3)]
        async with RabbitBus(",".join(proxy.url for proxy in proxies)) as bus:
            for dead in proxies:
                await eventually(lambda: is_usable(bus))
                dead.close()
                dead.sever()
            await eventually(lambda: is_disconnected(bus))
            await nodes.enter_async_context(TcpProxy(broker.url, port=proxies[0].port))
            await bus.wait_connected()


async def test_a_connection_that_is_lost_while_it_is_to_be_replaced_comes_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbit_bus_module, "_COME_BACK_S", (0.1, 0.1))
    monkeypatch.setattr(random, "shuffle", lambda _: None)
    open_link = Link.open
    waiting: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as nodes:
        first, second = [await nodes.enter_async_context(TcpProxy(broker.url)) for _ in range(2)]
        async with RabbitBus(f"{first.url},{second.url}") as bus:
            first.close()
            first.sever()
            await eventually(lambda: is_usable(bus))

            async def open_and_lose_the_other(link: Link) -> None:
                await open_link(link)
                if not waiting:
                    second.sever()
                    while bus.is_connected:  # noqa: ASYNC110 - it is connected again soon
                        await asyncio.sleep(0)
                    waiting.append(asyncio.create_task(bus.wait_connected()))
                    await asyncio.sleep(0)

            monkeypatch.setattr(Link, "open", open_and_lose_the_other)
            await nodes.enter_async_context(TcpProxy(broker.url, port=first.port))
            await eventually(lambda: has_any(waiting))
            await waiting[0]


async def has_any(found: list[asyncio.Task[None]]) -> bool:
    return bool(found)


@pytest.fixture
def patient_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_OPEN_TIMEOUT_S", LOGIN_S)


@pytest.mark.usefixtures("patient_login")
async def test_the_error_of_a_refused_login_names_the_address(broker: Broker) -> None:
    refused = URL(broker.url).with_password(PASSWORD)
    absent = refused.with_port(free_port())

    with pytest.raises(StartupError, match=f"127.0.0.1:{refused.port} refuses user"):
        async with RabbitBus(f"{absent},{refused}", timeout_s=LOGIN_S):
            pass


@pytest.mark.usefixtures("patient_login")
async def test_a_refused_login_stops_the_start(broker: Broker) -> None:
    url = str(URL(broker.url).with_password(PASSWORD))

    with pytest.raises(StartupError, match="refuses user 'operator'") as caught:
        async with RabbitBus(url, timeout_s=LOGIN_S):
            pass

    assert PASSWORD not in repr(caught.value)


@pytest.mark.usefixtures("patient_login")
async def test_a_refused_virtual_host_stops_the_start(broker: Broker) -> None:
    url = str(URL(broker.url).with_path("/no-such-vhost"))

    with pytest.raises(StartupError):
        async with RabbitBus(url, timeout_s=LOGIN_S):
            pass


@pytest.mark.parametrize(
    "url",
    [f"amqp://u:{PASSWORD}@h:port/", f"http://u:{PASSWORD}@h/", f"u:{PASSWORD}", ""],
)
def test_a_wrong_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(StartupError) as caught:
        RabbitBus(url)

    assert PASSWORD not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


async def test_the_password_is_never_logged(
    broker: Broker, proxy: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    password = URL(broker.url).password
    assert password is not None
    caplog.set_level(logging.INFO)
    async with connected_to(proxy.url) as bus:
        proxy.sever()
        await eventually(lambda: is_disconnected(bus))
        await bus.wait_connected()
    async with RabbitBus(str(URL(broker.url).with_port(free_port()))):
        pass

    shared_records = [record for record in caplog.records if record.name.startswith("shared")]
    assert shared_records
    assert password not in caplog.text
    assert password not in str([record.__dict__ for record in caplog.records])


async def test_tls(broker: Broker, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate(certificate, key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async with TcpProxy(broker.url, tls) as proxy:
        async with connected_to(f"{proxy.url}?cafile={certificate}") as bus:
            assert await bus.inspect("test.nothing") is None
        async with RabbitBus(proxy.url) as distrustful:
            assert not distrustful.is_connected


async def test_a_foreign_message_is_read_as_far_as_it_can_be(
    broker: Broker, rabbit_bus: RabbitBus, make_rabbit_queue: QueueMaker
) -> None:
    queue = make_rabbit_queue()
    await rabbit_bus.declare(queue)
    link = Link([URL(broker.url)], name="foreign", timeout_s=5)
    await link.open()
    await link.wait_connected()
    channel = await link.open_channel()
    await channel.basic_publish(
        b"{}", exchange=queue.bindings[0].exchange.name, routing_key=queue.name
    )
    await link.close()

    async with rabbit_bus.consume(queue.name) as consumer:
        [delivery] = await take(consumer)

    message = delivery.message
    assert message == Message(b"{}", message_id=message.message_id)


async def is_disconnected(bus: RabbitBus) -> bool:
    return not bus.is_connected


async def is_blocked(bus: RabbitBus) -> bool:
    return bus.is_blocked


async def is_usable(bus: RabbitBus) -> bool:
    with suppress(BusUnavailable):
        await bus.inspect("test.nothing")
        return True
    return False


def make_certificate(certificate: Path, key: Path) -> None:
    options = (
        f"-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(["openssl", "req", *options.split()], check=True, capture_output=True)


@pytest.mark.usefixtures("patient_login")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vhost": "nowhere"}, "refuses the virtual host 'nowhere' at the end of the URL: it does"),
        ({"vhost": "%2F"}, "refuses the virtual host '/'"),
        ({"password": "wrong"}, "refuses user 'worker': its password is wrong, or there is no"),
        ({"user": "nobody"}, "refuses user 'nobody'"),
    ],
)
async def test_a_refused_login_is_one_sentence(
    broker: Broker, change: dict[str, str], sentence: str
) -> None:
    url = URL(broker.url_of("worker"))
    url = url.with_path(f"/{change['vhost']}", encoded=True) if "vhost" in change else url
    url = url.with_user(change.get("user", "worker"))
    url = url.with_password(change.get("password", url.password))

    with pytest.raises(StartupError, match=sentence) as refused:
        async with RabbitBus(str(url), timeout_s=LOGIN_S):
            pass
    assert "<" not in str(refused.value)
    assert (URL(broker.url).password or "") not in str(refused.value)
