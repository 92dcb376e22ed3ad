"""Exchanges, queues and bindings that return after an operator has removed them."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from shared import topology
from shared.bus.base import Exchange, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.upkeep import Upkeep
from shared.errors import AccessRefused
from tests.support.gateway.http import eventually

MODEL = "m"
RESOURCES = topology.lasting_resources(MODEL)
QUEUES = [resource for resource in RESOURCES if isinstance(resource, Queue)]
KEPT_BY_OTHERS = {
    "near_queue": "the worker's upkeep",
    "resumed_queue": "the worker's upkeep",
    "jobs_queue": "the worker's upkeep",
    "reply_queue": "gateway.log.bindings",
    "probe_queue": "gateway.log.bindings",
    "quick_replies_queue": "its connection",
    "copy_queue": "its connection",
    "worker_queue": "its connection",
    "peers_queue": "its connection",
    "group_queue": "its connection",
    "gateway_queue": "its connection",
    "usage_queue": "its connection",
    "announcements_queue": "its connection",
    "publisher_queue": "its connection",
}
"""Who restores the bindings of the queues that `topology` describes by functions."""


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


class WatchedBus(MemoryBus):
    """Counts what was declared again."""

    num_declared = 0

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        missing = await super().declare_again(*resources)
        self.num_declared += len(resources)
        return missing

    async def is_kept(self) -> bool:
        """Whether a round of `RESOURCES` has ended."""
        return self.num_declared >= len(RESOURCES)


@asynccontextmanager
async def kept_up(
    bus: MemoryBus, resources: Iterable[Exchange | Queue] = RESOURCES, interval_s: float = 0.01
) -> AsyncIterator[Upkeep]:
    upkeep = Upkeep(bus, lambda: resources, interval_s)
    running = asyncio.create_task(upkeep.run())
    try:
        yield upkeep
    finally:
        running.cancel()


async def until_equal(broker: MemoryBroker, bindings: set[tuple[str, str, str]]) -> None:
    async def are_equal() -> bool:
        return broker.bindings == bindings and all(map(broker.has, RESOURCES))

    await eventually(are_equal)


def test_somebody_restores_each_kind_of_queue() -> None:
    kinds = {
        name
        for name, function in inspect.getmembers(topology, inspect.isfunction)
        if function.__module__ == topology.__name__
        and inspect.signature(function).return_annotation is Queue
        and not name.startswith("_")
    }

    assert kinds == set(KEPT_BY_OTHERS)


def test_every_exchange_is_kept_up() -> None:
    exchanges = {one for one in vars(topology).values() if isinstance(one, Exchange)}

    assert exchanges == set(topology.EXCHANGES) <= set(RESOURCES)


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.name)
async def test_a_queue_is_bound_again(broker: MemoryBroker, queue: Queue) -> None:
    async with MemoryBus(broker) as bus:
        await bus.declare(*RESOURCES)
        bindings = broker.bindings
        broker.unbind(queue.name)

        async with kept_up(bus):
            await until_equal(broker, bindings)


@pytest.mark.parametrize("exchange", topology.EXCHANGES, ids=lambda exchange: exchange.name)
async def test_an_exchange_is_declared_again_with_all_its_bindings(
    broker: MemoryBroker, exchange: Exchange, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedBus(broker) as bus:
        await bus.declare(*RESOURCES)
        bindings = broker.bindings

        with caplog.at_level(logging.WARNING):
            async with kept_up(bus):
                await eventually(bus.is_kept)
                broker.delete_exchange(exchange.name)
                await until_equal(broker, bindings)

    [line] = [record for record in caplog.records if record.message == "declared again"]
    assert vars(line)["resource"] == exchange.name


async def test_what_was_never_there_is_declared_without_a_word(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedBus(broker) as bus, kept_up(bus):
        await eventually(bus.is_kept)

    assert all(map(broker.has, RESOURCES))
    assert [record.message for record in caplog.records] == []


async def test_what_is_asked_for_is_declared_at_once(broker: MemoryBroker) -> None:
    async with MemoryBus(broker) as bus:
        await bus.declare(*RESOURCES)
        bindings = broker.bindings
        broker.unbind(QUEUES[0].name)

        async with kept_up(bus, interval_s=3600.0) as upkeep:
            upkeep.ask()
            await until_equal(broker, bindings)


class RefusingBus(MemoryBus):
    num_refused = 0

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        self.num_refused += 1
        raise AccessRefused("access to exchange 'warren.jobs' refused")


async def test_what_only_an_operator_may_declare_is_reported_once(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with RefusingBus(broker) as bus, kept_up(bus, [topology.JOBS]):

        async def is_refused_often() -> bool:
            return bus.num_refused >= 3

        await eventually(is_refused_often)

    [line] = [one for one in caplog.records if one.message == "cannot be declared again"]
    assert vars(line)["resource"] == "warren.jobs"
    assert "definitions.json" in vars(line)["remedy"]
