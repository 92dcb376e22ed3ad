import asyncio
import io
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cli.batch.input_file import BatchFile
from cli.batch.journal import Header, Journal
from cli.batch.pipeline import BatchRun, run_batch
from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_queue import MemoryConsumer
from shared.client import replies as replies_module
from shared.client.replies import REPLIES_EXPIRE_S, Replies
from shared.errors import BusUnavailable, QueueBusy
from tests.support.workers.batch_files import chat_line, chat_text, read_lines, write_lines
from tests.support.workers.batch_worker import (
    SERVED,
    BatchWorker,
    answer_text,
    jobs_wait,
    working,
)

NUM_LINES = 120
WINDOW = 16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = (chat_line(f"row {k}", content=f"question {k}") for k in range(NUM_LINES))
    return write_lines(tmp_path / "in.jsonl", *lines)


async def cancel(task: "asyncio.Task[object]") -> None:
    """End a run, which may have ended already because the broker was gone."""
    task.cancel()
    with suppress(asyncio.CancelledError, BusUnavailable):
        await task


def size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def assert_complete(output: Path) -> None:
    answers = read_lines(output)
    assert [answer["custom_id"] for answer in answers] == [f"row {k}" for k in range(NUM_LINES)]
    assert [chat_text(answer) for answer in answers] == [
        answer_text(f"question {k}") for k in range(NUM_LINES)
    ]


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_dies_and_whenever_each_line_has_one_answer(
    seed: int, memory_broker: MemoryBroker, source: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    longest_s = 0.02
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    async with MemoryBus(memory_broker) as theirs:
        worker = BatchWorker(theirs, faults=chance)
        async with working(worker):
            while not output.exists():
                before = size_of(part)
                async with MemoryBus(memory_broker, user="publisher") as bus:
                    run = asyncio.create_task(run_batch(source, output, bus, window=4))
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(chance.uniform(0, 0.004))
                        chance.choice((bus, theirs)).sever()
                    await asyncio.wait([run], timeout=chance.uniform(0, longest_s))
                    await cancel(run)
                # Some of them answer lines, however slow the machine is.
                longest_s *= 1.03 if size_of(part) > before else 1.2

    assert_complete(output)


async def test_what_is_done_is_not_done_again(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    worker = BatchWorker(theirs)
    async with working(worker):
        half_done = asyncio.Event()
        run = asyncio.create_task(
            run_batch(
                source,
                tmp_path / "out.jsonl",
                bus,
                window=WINDOW,
                on_progress=lambda now: half_done.set() if now.num_done > 60 else None,
            )
        )
        await half_done.wait()
        await cancel(run)
        done = {line["custom_id"] for line in read_lines(tmp_path / "out.jsonl.part")[1:]}
        await run_batch(source, tmp_path / "out.jsonl", bus, window=WINDOW)

    assert_complete(tmp_path / "out.jsonl")
    file = BatchFile.check(source)
    executed = {
        file.custom_ids[k]: worker.num_answers[file.request_id(k)] for k in range(len(file))
    }
    assert len(done) > 60
    assert {executed[custom_id] for custom_id in done} == {1}
    assert sum(executed.values()) <= NUM_LINES + WINDOW


async def test_answers_that_came_while_nobody_waited_are_taken(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    worker = BatchWorker(theirs)
    run = asyncio.create_task(run_batch(source, output, bus, window=NUM_LINES))
    await jobs_wait(theirs, NUM_LINES)
    await cancel(run)
    async with working(worker):
        await worker.has_answered(NUM_LINES)

    await run_batch(source, output, bus)

    assert_complete(output)
    assert worker.num_answers.total() == NUM_LINES


async def test_answers_that_cannot_be_kept_stay_at_the_broker(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    file = BatchFile.check(source)
    # A file in memory has no descriptor, so fsync fails.
    broken = Journal(io.BytesIO(), output, Header(file.digest))
    worker = BatchWorker(theirs)
    async with working(worker):
        replies = Replies(bus, file.run_id, prefetch=NUM_LINES)
        await replies.declare()
        run = BatchRun(file, broken, bus, replies, window=NUM_LINES, on_progress=lambda _: None)
        with pytest.raises(OSError, match="fileno"):
            await run.answer_all()
        await worker.has_answered(NUM_LINES)

    await run_batch(source, output, bus)

    assert_complete(output)
    assert worker.num_answers.total() == NUM_LINES


async def test_a_run_continues_with_the_announcement_that_the_first_one_received(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    """Answers to the first run's jobs may arrive in the second, when no worker announces itself."""
    output = tmp_path / "out.jsonl"
    thoughtful = chat_line("row 0", content="!>kniht/<!!>kniht<"[1:-1])
    source = write_lines(tmp_path / "thoughtful.jsonl", thoughtful)
    worker = BatchWorker(theirs)
    Journal.open(output, BatchFile.check(source).digest, SERVED).__exit__()
    run = asyncio.create_task(run_batch(source, output, bus))
    await jobs_wait(theirs, 1)
    async with working(worker):
        await run

    (answer,) = read_lines(output)
    assert answer["response"]["body"]["choices"][0]["message"]["reasoning_content"] == "!!"


async def test_a_lost_reply_queue_costs_repetition_and_no_line(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    run = asyncio.create_task(run_batch(source, tmp_path / "out.jsonl", bus, window=WINDOW))
    await jobs_wait(theirs, WINDOW)
    await theirs.delete_queue(f"reply.{BatchFile.check(source).run_id}")
    async with working(BatchWorker(theirs)):
        await run

    assert_complete(tmp_path / "out.jsonl")


class RefusedBus(MemoryBus):
    """Says when a queue was found to have another consumer."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, user="publisher")
        self.was_refused = asyncio.Event()

    @asynccontextmanager
    async def consume(
        self, queue: str, *, prefetch: int = 0, is_exclusive: bool = False
    ) -> AsyncIterator[MemoryConsumer]:
        try:
            async with super().consume(
                queue, prefetch=prefetch, is_exclusive=is_exclusive
            ) as consumer:
                yield consumer
        except QueueBusy:
            self.was_refused.set()
            raise


async def test_a_run_waits_for_the_connection_of_its_predecessor_to_end(
    memory_broker: MemoryBroker, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    replies = topology.reply_queue(BatchFile.check(source).run_id, REPLIES_EXPIRE_S)
    async with RefusedBus(memory_broker) as bus, working(BatchWorker(theirs)):
        await theirs.declare(replies)
        async with theirs.consume(replies.name, is_exclusive=True):
            run = asyncio.create_task(run_batch(source, tmp_path / "out.jsonl", bus))
            await bus.was_refused.wait()
        await run

    assert_complete(tmp_path / "out.jsonl")


async def test_a_run_beside_another_one_of_the_same_input_is_refused(
    bus: MemoryBus,
    theirs: MemoryBus,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies_module, "_BUSY_TIMEOUT_S", 0.2)
    replies = topology.reply_queue(BatchFile.check(source).run_id, REPLIES_EXPIRE_S)
    await theirs.declare(replies)
    async with theirs.consume(replies.name, is_exclusive=True):
        with pytest.raises(QueueBusy):
            await run_batch(source, tmp_path / "out.jsonl", bus)


async def test_a_crash_after_the_output_was_written_changes_nothing(
    bus: MemoryBus, theirs: MemoryBus, source: Path, tmp_path: Path
) -> None:
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    async with working(BatchWorker(theirs)):
        run = asyncio.create_task(run_batch(source, output, bus))
        journal = b""
        while not run.done():
            with suppress(FileNotFoundError):
                journal = part.read_bytes()
            await asyncio.sleep(0)
    before = output.read_bytes()
    part.write_bytes(journal)

    summary = await run_batch(source, output, bus)

    assert output.read_bytes() == before
    assert summary.num_lines == NUM_LINES
