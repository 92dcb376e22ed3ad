import asyncio
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from cli.batch.pipeline import run_batch
from cli.batch.progress import BatchProgress
from shared import topology
from shared.bus.base import Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import InvalidRequest, ModelNotFound
from tests.support.workers.batch_files import (
    chat_line,
    chat_text,
    completion_line,
    read_lines,
    write_lines,
)
from tests.support.workers.batch_worker import (
    MODEL,
    BatchWorker,
    answer_text,
    jobs_wait,
    working,
)

TIME = {"type": "function", "function": {"name": "get_time"}}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_every_line_is_answered_in_the_order_of_the_input(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    lines = [chat_line(f"row {k}", content=f"question {k}") for k in range(100)]
    source = write_lines(tmp_path / "in.jsonl", *lines)

    summary = await run_batch(source, tmp_path / "out.jsonl", bus)

    answers = read_lines(tmp_path / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == [f"row {k}" for k in range(100)]
    assert [chat_text(answer) for answer in answers] == [
        answer_text(f"question {k}") for k in range(100)
    ]
    assert (summary.num_lines, summary.num_failed) == (100, 0)
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl"]


async def test_an_answer_has_openais_shape(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", chat_line("chat"), completion_line("text", ["one", "two"])
    )

    await run_batch(source, tmp_path / "out.jsonl", bus)

    chat, text = read_lines(tmp_path / "out.jsonl")
    for answer in (chat, text):
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
    completion = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    assert completion.choices[0].message.content == answer_text("hello")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 7
    completions = Completion.model_validate(text["response"]["body"], strict=True)
    assert [choice.text for choice in completions.choices] == [
        answer_text("one"),
        answer_text("two"),
    ]


async def test_a_call_of_a_tool_is_worded_as_the_endpoint_words_it(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    call = '{"name": "get_time", "arguments": {"zone": 1}}'
    text = f"<think>hm</think>\n<tool_call>\n{call}\n</tool_call>"
    line = chat_line("a", content=text[-2:0:-1], tools=[TIME], tool_choice="auto")
    source = write_lines(tmp_path / "in.jsonl", line, chat_line("b"))

    await run_batch(source, tmp_path / "out.jsonl", bus)

    body = read_lines(tmp_path / "out.jsonl")[0]["response"]["body"]
    (choice,) = ChatCompletion.model_validate(body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (called,) = choice.message.tool_calls
    assert isinstance(called, ChatCompletionMessageFunctionToolCall)
    assert (called.function.name, called.function.arguments) == ("get_time", '{"zone": 1}')
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"


async def test_a_line_that_fails_fails_alone(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", chat_line("bad", content="too long"), chat_line("good")
    )

    summary = await run_batch(source, tmp_path / "out.jsonl", bus)

    bad, good = read_lines(tmp_path / "out.jsonl")
    assert summary.num_failed == 1
    assert good["response"]["status_code"] == 200
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_line_refused_for_overload_is_tried_again(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", content="busy"))

    summary = await run_batch(source, tmp_path / "out.jsonl", bus)

    assert summary.num_failed == 0
    assert chat_text(read_lines(tmp_path / "out.jsonl")[0]) == answer_text("busy")
    assert worker.num_answers.total() == 2


async def test_no_more_jobs_than_the_window_are_in_the_queue(
    bus: MemoryBus, theirs: MemoryBus, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *(chat_line(str(k)) for k in range(60)))
    worker = BatchWorker(theirs)

    running = asyncio.create_task(run_batch(source, tmp_path / "out.jsonl", bus, window=8))
    await jobs_wait(theirs, 8)
    async with working(worker):
        await running

    assert worker.max_ready <= 8


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    broker = MemoryBroker()
    small = Queue(
        f"jobs.{MODEL}.batch", (topology.jobs_binding(MODEL, "batch"),), "quorum", max_length=2
    )
    source = write_lines(tmp_path / "in.jsonl", *(chat_line(str(k)) for k in range(12)))
    async with MemoryBus(broker) as theirs, MemoryBus(broker, user="publisher") as bus:
        await theirs.declare(small)
        running = asyncio.create_task(run_batch(source, tmp_path / "out.jsonl", bus))
        await jobs_wait(theirs, 2)
        async with working(BatchWorker(theirs)):
            summary = await running

    assert (summary.num_lines, summary.num_failed) == (12, 0)


async def test_progress_grows_to_the_whole(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    reports: list[BatchProgress] = []
    lines = [chat_line(str(k)) for k in range(40)]
    source = write_lines(tmp_path / "in.jsonl", chat_line("bad", content="too long"), *lines)

    summary = await run_batch(
        source, tmp_path / "out.jsonl", bus, window=4, on_progress=reports.append
    )

    dones = [report.num_done for report in reports]
    assert dones == sorted(dones)
    assert (dones[0], dones[-1]) == (0, 41)
    assert reports[-1].num_failed == 1
    assert reports[-1].num_tokens == summary.num_tokens == 40 * len(answer_text("hello"))
    assert reports[-1].tokens_per_s > 0


async def test_a_model_that_nobody_has_served_is_not_found(bus: MemoryBus, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model="unheard-of"))

    with pytest.raises(ModelNotFound):
        await run_batch(source, tmp_path / "out.jsonl", bus)


async def test_a_finished_output_is_not_overwritten(bus: MemoryBus, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    (tmp_path / "out.jsonl").write_text("precious")

    with pytest.raises(InvalidRequest, match=r"out\.jsonl exists"):
        await run_batch(source, tmp_path / "out.jsonl", bus)

    assert (tmp_path / "out.jsonl").read_text() == "precious"


async def test_nothing_is_left_at_the_broker(
    bus: MemoryBus, worker: BatchWorker, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))

    await run_batch(source, tmp_path / "out.jsonl", bus)
    (tmp_path / "out.jsonl").unlink()
    await run_batch(source, tmp_path / "out.jsonl", bus)

    assert worker.num_answers.total() == 2
