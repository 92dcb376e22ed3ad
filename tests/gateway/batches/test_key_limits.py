import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.key_limits import LineLimits, LineSlot, key_of
from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.keys.key_file import KeyFile, read_keys
from gateway.intake.limits import Limits
from gateway.store.batches import BatchRecord
from shared.bus.memory import MemoryBus
from shared.errors import InvalidRequest
from tests.support.gateway.http import running_limits

START = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


@pytest.fixture
async def limits(bus: MemoryBus, clock: Clock) -> AsyncIterator[Limits]:
    async with running_limits(Limits(bus, 10, clock), bus) as limits:
        yield limits


def batch_of(key: ApiKey) -> BatchRecord:
    values: dict[str, Any] = {field.name: None for field in fields(BatchRecord)}
    named = {"id": "batch_1", "tenant": key.tenant, "key_id": key.key_id, "key_limits": key.limits}
    return BatchRecord(**{**values, **named})


def ordered(file: KeyFile, **limited: int) -> BatchRecord:
    """A batch of a new key."""
    file.add("alice", **limited)
    (key,) = read_keys(file.path).values()
    return batch_of(key)


async def admitted(slot: LineSlot, num_tokens: int, order: list[int]) -> None:
    grant = await slot.take(num_tokens)
    grant.note_published()
    order.append(num_tokens)


async def test_a_minute_admits_as_many_lines_as_the_key_has(
    limits: Limits, clock: Clock, file: KeyFile
) -> None:
    lines = LineLimits(ordered(file, requests_per_minute=2), Keys(file.path), limits)
    order: list[int] = []
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        slots = [await stack.enter_async_context(lines.slot()) for _ in range(5)]
        waiting = [tasks.create_task(admitted(slot, k, order)) for k, slot in enumerate(slots, 1)]
        for minute in range(3):
            for task in waiting[2 * minute : 2 * minute + 2]:
                await task
            assert order == [1, 2, 3, 4, 5][: 2 * minute + 2]
            clock.now += 61


async def test_small_lines_do_not_overtake_a_large_one(
    limits: Limits, clock: Clock, file: KeyFile
) -> None:
    lines = LineLimits(ordered(file, tokens_per_minute=100), Keys(file.path), limits)
    order: list[int] = []
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        slots = [await stack.enter_async_context(lines.slot()) for _ in range(3)]
        await admitted(slots[0], 60, order)
        large = tasks.create_task(admitted(slots[1], 90, order))
        small = tasks.create_task(admitted(slots[2], 10, order))
        clock.now += 61
        await asyncio.gather(large, small)

    assert order == [60, 90, 10]


async def test_a_line_that_is_tried_again_keeps_its_place(limits: Limits, file: KeyFile) -> None:
    lines = LineLimits(ordered(file, max_concurrent=1), Keys(file.path), limits)

    async with lines.slot() as slot:
        first = await slot.take(10)
        assert await slot.take(10) is first
    async with lines.slot() as slot:
        await slot.take(10)


async def test_a_line_beyond_the_limit_is_refused(limits: Limits, file: KeyFile) -> None:
    lines = LineLimits(ordered(file, tokens_per_minute=100), Keys(file.path), limits)

    async with lines.slot() as slot:
        with pytest.raises(InvalidRequest):
            await slot.take(101)


def test_changed_limits_are_in_force_at_once(file: KeyFile) -> None:
    batch = ordered(file, requests_per_minute=2)
    file.path.write_text(file.path.read_text().replace("requests_per_minute=2", "max_tokens=7"))

    assert key_of(batch, Keys(file.path)).limits == {"max_tokens": 7}


def test_the_batch_of_a_revoked_key_keeps_its_limits(file: KeyFile) -> None:
    batch = ordered(file, requests_per_minute=2, max_tokens=7)
    file.revoke(batch.key_id)

    left = key_of(batch, Keys(file.path))

    assert (left.key_id, left.tenant) == (batch.key_id, "alice")
    assert left.limits == {"requests_per_minute": 2, "max_tokens": 7}


def test_another_tenants_key_of_the_same_id_is_not_taken(file: KeyFile) -> None:
    batch = replace(ordered(file, max_tokens=7), tenant="bob")

    assert key_of(batch, Keys(file.path)).tenant == "bob"


def test_a_batch_without_a_key_has_no_limits() -> None:
    assert key_of(batch_of(ApiKey("", "", "", "")), Keys(None)).limits == {}
