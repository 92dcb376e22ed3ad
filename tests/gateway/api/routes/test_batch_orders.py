"""What the order of a batch may ask for: several models, a window, an expiry of its output."""

from collections.abc import AsyncIterator

import pytest
from openai.types import Batch

from shared.bus.memory import MemoryBus
from tests.support.gateway.batches import chat, ended, order, output, texts, until
from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker, start_only

OTHER = "other"


@pytest.fixture
async def other_worker(worker_bus: MemoryBus) -> AsyncIterator[ScriptedWorker]:
    """Serves another model, with answers that no other worker gives."""

    async def name_itself(job: ScriptedJob) -> None:
        await job.start()
        await job.finish(OTHER)

    async with ScriptedWorker(worker_bus, name_itself, OTHER) as worker:
        yield worker


async def test_the_lines_of_a_file_may_name_several_models(
    storing: LiveGateway, other_worker: ScriptedWorker
) -> None:
    lines = [chat(f"line {k}", **({"model": OTHER} if k % 2 else {})) for k in range(6)]

    batch = await ended(storing, await order(storing, lines))

    assert (batch.status, batch.model) == ("completed", None)
    answers = await output(storing, batch.output_file_id)
    expected = {f"line {k}": OTHER if k % 2 else "one two three" for k in range(6)}
    assert texts(answers) == expected
    assert [answer["custom_id"] for answer in answers] == list(expected)


async def test_a_model_that_does_not_answer_holds_up_no_other(
    storing: LiveGateway, other_worker: ScriptedWorker
) -> None:
    other_worker.script = start_only
    lines = [*(chat(f"late {k}", model=OTHER) for k in range(3)), chat("a"), chat("b")]

    def has_two(now: Batch) -> bool:
        return now.request_counts is not None and now.request_counts.completed == 2

    batch = await until(storing, await order(storing, lines), has_two)
    await storing.openai.batches.cancel(batch.id)
    batch = await ended(storing, batch)

    assert set(texts(await output(storing, batch.output_file_id))) == {"a", "b"}


@pytest.mark.parametrize(
    ("window", "seconds"), [("90s", 90), ("2m", 120), ("24h", 86_400), ("14d", 14 * 86_400)]
)
async def test_a_window_is_a_duration(storing: LiveGateway, window: str, seconds: int) -> None:
    batch = await order(storing, [chat("a")], window=window)

    assert batch.completion_window == window
    assert batch.expires_at is not None
    assert batch.expires_at - batch.created_at == seconds
    await ended(storing, batch)


async def test_output_files_expire_when_the_order_says_so(storing: LiveGateway) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}

    batch = await ended(storing, await order(storing, [chat("a")], output_expires_after=expiry))

    assert batch.output_file_id is not None
    file = await storing.openai.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == pytest.approx(7200, abs=60)
