"""The class in which the lines of a batch run while its window closes."""

from pathlib import Path

import pytest

from gateway.batches import closing
from gateway.batches.closing import Closing
from gateway.store.batches import BatchRecord, Order
from shared.bus.memory import MemoryBus
from shared.messages import JobClass
from tests.gateway.batches.test_batch_runner import stored
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

WINDOW_S = 1000
ORDER = Order("/v1/chat/completions", "", "1000s", WINDOW_S)


@pytest.fixture
async def batch(tmp_path: Path) -> BatchRecord:
    async with stored(tmp_path) as state:
        async with state.files.writing("", "in.jsonl", "batch") as draft:
            await draft.write(b"{}\n")
        return await state.batches.create("", ORDER._replace(input_file_id=draft.id))


@pytest.mark.parametrize(
    ("at", "num_answered", "num_left", "job_class"),
    [
        pytest.param(500, 1, 1000, "batch", id="half of the window is left"),
        pytest.param(950, 950, 10, "batch", id="in time"),
        pytest.param(950, 950, 60, "interactive", id="late"),
        pytest.param(950, 0, 1, "interactive", id="nothing was answered"),
        pytest.param(950, 0, 0, "batch", id="nothing is left"),
    ],
)
async def test_a_late_batch_has_interactive_priority(
    batch: BatchRecord, at: float, num_answered: int, num_left: int, job_class: JobClass
) -> None:
    run = Closing(batch, now=batch.created_at)
    run.num_left = num_left + num_answered
    for _ in range(num_answered):
        run.answered()

    assert run.job_class(now=batch.created_at + at) == job_class


async def test_the_lines_of_a_late_batch_are_published_as_interactive(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "_LAST_PART", 1.0)
    async with live_gateway(bus, data_dir=tmp_path, max_batch_window=1) as gateway:
        batch = await ended(gateway, await order(gateway, [chat(str(k)) for k in range(3)]))
        num_promoted = await gateway.sample("warren_gateway_batch_lines_promoted_total")

    assert batch.status == "completed"
    assert [job.lane for job in worker.jobs] == ["interactive", "batch", "batch"]
    assert num_promoted == 1
    assert batch.model_extra is not None
    assert batch.model_extra["num_promoted"] == 1
