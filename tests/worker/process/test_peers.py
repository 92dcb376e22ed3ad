"""Workers with the same name serve the same model, or they do not start; they know of each other's
free slots."""

import asyncio
import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from bench.echo_worker import echo_model
from shared import settings
from shared.bus.base import Exchange, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import StartupError
from shared.messages import Announcement
from shared.settings import WorkerSettings
from tests.support.workers.jobs import num_ready
from tests.support.workers.synthetic import echo_worker
from worker.process.peers import FreeSlots, compare, hear_peers
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
