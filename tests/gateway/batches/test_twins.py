"""Equal lines of a batch are computed once."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.batches.twins import Twins, twin_key
from shared.bus.memory import MemoryBus
from tests.support.gateway.batches import chat, ended, order, output, texts
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker, wait_before_the_end

GREEDY = {"temperature": 0}


def key(**more: Any) -> bytes:
    return twin_key(json.dumps({"model": "m", "messages": [], **more}).encode())


@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"temperature": 0.0}, {"top_k": 1}, {"seed": 3}]
)
def test_determined_requests_have_equals(more: dict[str, Any]) -> None:
    assert key(**more) == key(**more) != b""
    assert key(**more) != key(**more, max_tokens=3)


@pytest.mark.parametrize("more", [{}, {"temperature": 1}, {"seed": None}, {"temperature": "0"}])
def test_other_requests_have_none(more: dict[str, Any]) -> None:
    assert key(**more) == b""


def test_spaces_between_fields_do_not_count() -> None:
    assert twin_key(b'{"seed":1,"model":"m"}') == twin_key(b'{ "seed": 1,\n "model": "m" }')


async def test_a_line_belongs_to_the_group_of_the_line_before() -> None:
    twins = Twins()

    roles = [twins.role(one) for one in (b"a", b"a", b"", b"b", b"a")]

    assert [role and role.is_first for role in roles] == [True, False, None, True, True]
    assert roles[0] is not None
    assert roles[1] is not None
    assert roles[0].group is roles[1].group


async def test_a_batch_computes_equal_lines_once(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    contents = ["a b", "c d", "a b", "e", "a b", "c d"]
    lines = [chat(str(number), content, **GREEDY) for number, content in enumerate(contents)]
    batch = await ended(gateway, await order(gateway, [*lines, chat("6", "a b"), chat("7", "a b")]))

    answers = await output(gateway, batch.output_file_id)

    assert len(worker.jobs) == 5
    assert texts(answers) == {str(k): text for k, text in enumerate([*contents, "a b", "a b"])}
    assert len({line["response"]["body"]["id"] for line in answers}) == 8
    for line in answers:
        assert line["response"]["body"]["id"] == line["response"]["request_id"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 2 * 7 + 1


async def test_lines_that_wait_for_an_equal_line_leave_its_slots_to_others(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker)
    async with live_gateway(bus, max_batch_window=2) as gateway:
        await hears_a_worker(gateway)
        contents = ["a b"] * 6 + ["c d"]  # more than fit into the window
        lines = [chat(str(number), content, **GREEDY) for number, content in enumerate(contents)]
        ordered = await order(gateway, lines)

        await worker.wait_until(lambda: len(worker.jobs) == 2)

        may_end.set()
        batch = await ended(gateway, ordered)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 7


async def test_equal_lines_are_computed_singly_by_other_engines(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.announcement = replace(worker.announcement, engine="vllm 1")
    async with live_gateway(bus) as gateway:
        await hears_a_worker(gateway)
        lines = [chat(str(number), "a b", **GREEDY) for number in range(3)]
        batch = await ended(gateway, await order(gateway, lines))

    assert len(worker.jobs) == 3
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 3
