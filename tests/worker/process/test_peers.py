"""Workers with the same name serve the same model, or they do not start; they know of each other's
free slots."""

import asyncio
import dataclasses
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.echo_worker import echo_model
from shared import settings, topology
from shared.bus.base import Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import AccessRefused, StartupError, Unroutable
from shared.messages import Announcement, decode_announcement, encode
from shared.settings import WorkerSettings
from tests.support import PATIENCE_S
from tests.support.workers.jobs import num_ready
from tests.support.workers.synthetic import echo_worker
from worker.process.peers import FreeSlots, Peers, compare, hear_peers, num_groups
from worker.process.service import run_worker
from worker.process.tuning import WorkerTuning

INTERVAL_S = 0.25


class HearingBus(MemoryBus):
    """Lets each listener find that a worker has spoken, however busy the machine is."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        await super().declare(*resources)
        for resource in resources:
            if resource.name.endswith(".peers"):
                while not await num_ready(self, resource.name):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def run_with(bus: MemoryBus, **changes: Any) -> None:
    """Run a worker briefly."""
    worker = settings.load(WorkerSettings)
    model = dataclasses.replace(echo_model(worker), **changes)
    stop = asyncio.Event()
    tuning = WorkerTuning(announce_interval_s=INTERVAL_S)
    await run_worker(worker, bus, stop=stop, ready=stop.set, model=model, tuning=tuning)


async def test_another_model_under_a_name_that_is_served_does_not_start() -> None:
    broker = MemoryBroker()
    async with HearingBus(broker) as bus, echo_worker(broker):
        with pytest.raises(StartupError, match=r"'echo'.*--served-name") as refused:
            await run_with(bus, fingerprint="other")

    assert "other" in refused.value.message


def test_a_worker_says_which_other_numerics_its_peers_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = dataclasses.replace(echo_model(settings.load(WorkerSettings)), numerics="cpu avx2")
    peers = [
        replace(announced(numerics), fingerprint=model.fingerprint)
        for numerics in ("cpu avx2", "cpu avx512", "")
    ]

    compare(peers, model)

    (record,) = caplog.records
    assert vars(record)["of_peers"] == ["cpu avx512"]


def announced(numerics: str) -> Announcement:
    return Announcement(
        worker="w",
        model="m",
        vocab_size=1,
        max_seq_len=1,
        fingerprint="f",
        numerics=numerics,
        max_num_seqs=1,
    )


@pytest.mark.parametrize("changes", [{}, {"name": "another", "fingerprint": "other"}])
async def test_the_same_model_and_other_names_start(changes: dict[str, str]) -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, echo_worker(broker):
        await run_with(bus, **changes)


async def test_a_model_may_change_once_its_workers_have_left() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus:
        async with echo_worker(broker):
            pass
        await run_with(bus, fingerprint="other")


async def test_a_worker_that_is_alone_starts_at_once() -> None:
    async with MemoryBus() as bus, asyncio.timeout(60):
        heard = await hear_peers(bus, "echo", "me", announce_interval_s=60)

    assert heard == []


async def test_peers_are_heard_within_little_more_than_an_interval() -> None:
    broker = MemoryBroker()
    async with HearingBus(broker) as bus, echo_worker(broker):
        async with asyncio.timeout(60):
            heard = await hear_peers(bus, "echo", "me", INTERVAL_S)
            left_behind = await bus.inspect("control.worker.me.peers")

    assert [peer.model for peer in heard] == ["echo"]
    assert left_behind is None


def test_free_slots_are_those_of_other_workers_of_the_model() -> None:
    other = replace(announced(""), worker="other", max_num_seqs=8, num_running=3, num_waiting=1)
    slots = FreeSlots("m", "me")

    slots.hear(other)
    slots.hear(replace(other, worker="overloaded", num_waiting=20))
    slots.hear(replace(other, worker="foreign", model="another"))
    slots.hear(replace(other, worker="me"))

    assert slots.count == 4


def test_free_slots_are_taken_until_they_are_announced_again() -> None:
    other = replace(announced(""), worker="other", max_num_seqs=8)
    slots = FreeSlots("m", "me")
    slots.hear(other)

    slots.take(5)
    num_left = slots.count
    slots.hear(other)

    assert (num_left, slots.count) == (3, 8)


def test_a_worker_that_leaves_has_no_free_slots() -> None:
    other = replace(announced(""), worker="other", max_num_seqs=8)
    slots = FreeSlots("m", "me")
    slots.hear(other)

    slots.hear(replace(other, is_leaving=True))

    assert slots.count == 0


def heard_from(name: str, **changes: Any) -> bytes:
    return encode(replace(announced(""), worker=name, max_num_seqs=4, **changes))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(broker: MemoryBroker, number: int = 0) -> AsyncIterator[Peers]:
    worker_id = f"{number:032x}"
    async with MemoryBus(broker) as bus:
        peers = Peers(bus, "m", worker_id, f"worker.{worker_id}", count_interval_s=0.02)
        task = asyncio.create_task(peers.listen())
        try:
            await until(lambda: broker.has(peers.queue))
            yield peers
        finally:
            task.cancel()
            await asyncio.wait([task])


async def announce_many(bus: MemoryBus) -> None:
    """Announce more workers, of another model, than a worker listens to."""
    for number in range(60):
        with suppress(Unroutable):
            message = Message(heard_from(f"other {number}", model="another"))
            await bus.publish(topology.ANNOUNCEMENTS, message)
    await asyncio.sleep(0.01)


async def test_a_worker_of_a_small_fleet_hears_workers_of_the_previous_version() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, listening(broker) as peers:
        await bus.publish(topology.ANNOUNCEMENTS, Message(heard_from("old")))
        await until(lambda: peers.free.count == 4)

        assert peers.queue == topology.peers_queue(f"{0:032x}")


async def test_a_worker_of_a_large_fleet_hears_its_group_alone() -> None:
    broker = MemoryBroker()
    said = decode_announcement(heard_from("other", num_running=1))
    async with (
        MemoryBus(broker) as bus,
        listening(broker) as peers,
        listening(broker, number=1) as other,
    ):
        async with asyncio.timeout(PATIENCE_S):
            while not (peers.queue.name.endswith(".group") and broker.has(peers.queue)):
                await announce_many(bus)
        group = other.news(said)
        assert group is not None
        await bus.publish(group, Message(encode(said)))
        await until(lambda: peers.free.count == 3)
        await until(lambda: not broker.has(topology.peers_queue(f"{0:032x}")))


class LimitedBus(MemoryBus):
    """A connection whose user may not listen to groups."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        if any(resource.name.endswith(".group") for resource in resources):
            self.num_refused += 1
            raise AccessRefused("no")
        await super().declare(*resources)

    num_refused = 0


async def test_a_worker_that_may_not_listen_to_its_group_hears_all() -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, LimitedBus(broker) as limited:
        peers = Peers(limited, "m", "0f", "worker.0f", count_interval_s=0.02)
        listening = asyncio.create_task(peers.listen())
        async with asyncio.timeout(PATIENCE_S):
            while not limited.num_refused:
                await announce_many(bus)
            await until(lambda: broker.has(topology.peers_queue("0f")))
            await announce_many(bus)
            await announce_many(bus)
            await bus.publish(topology.ANNOUNCEMENTS, Message(heard_from("other")))
            await until(lambda: peers.free.count == 4)
        listening.cancel()

    assert limited.num_refused == 1


def test_a_group_is_told_of_news_and_now_and_then() -> None:
    bus, now = MemoryBus(), [0.0]
    peers = Peers(bus, "m", "1f", "worker.1f", clock=lambda: now[0])
    free, busy, leaving = (
        decode_announcement(heard_from("me", **changes))
        for changes in ({}, {"num_running": 4}, {"num_running": 4, "is_leaving": True})
    )

    told = []
    for at, announcement in enumerate([free, free, free, busy, busy, leaving]):
        now[0] = at * topology.ANNOUNCE_INTERVAL_S
        told.append(peers.news(announcement) is not None)

    assert told == [True, False, True, True, False, True]


@given(num_workers=st.integers(0, 5000))
def test_groups_are_as_large_as_their_limit_allows(num_workers: int) -> None:
    groups = num_groups(num_workers)

    assert groups == 1 or num_workers / groups > topology.MAX_PEERS / 4
    assert num_workers / groups <= topology.MAX_PEERS


def test_the_workers_of_a_group_agree_on_it_and_groups_are_about_equal() -> None:
    ids = [uuid.UUID(int=random.Random(k).getrandbits(128)).hex for k in range(1000)]

    sizes = Counter(topology.group_binding("m", 64, one) for one in ids)

    assert len(sizes) == 64
    assert max(sizes.values()) < 40
    assert all(topology.group_queue("m", 64, one).bindings[0] in sizes for one in ids)
