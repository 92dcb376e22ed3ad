"""The Responses API, through the official client."""

import asyncio
from typing import Any

import pytest

from gateway.log.relay import LogRelay
from shared.bus.memory import MemoryBus
from shared.errors import InternalError
from shared.messages import ChatPrompt, Failed
from tests.support.gateway.http import (
    LiveGateway,
    eventually,
    hears_a_worker,
    live_gateway,
    skip,
)
from tests.support.models.grammars import matches
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    wait_before_the_end,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


async def test_a_response_comes_whole(gateway: LiveGateway) -> None:
    response = await gateway.openai.responses.create(model=MODEL, input="one two")

    assert response.output_text == "one two"
    assert response.status == "completed"
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (2, 2)


async def test_a_response_is_streamed(gateway: LiveGateway) -> None:
    async with gateway.openai.responses.stream(model=MODEL, input="one two") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert final.output_text == "one two"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))


@pytest.mark.parametrize("error", ["in the log", "of the gateway"])
async def test_a_stream_that_fails_before_its_start_can_be_read(
    bus: MemoryBus, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    has_begun = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await has_begun.wait()
        if error == "in the log":
            await job.publish(Failed(code="deadline_exceeded", message="Too late."))
        else:
            monkeypatch.setattr(LogRelay, "take", lose)

    async def lose(*_: object) -> None:
        raise InternalError("Lost.")

    worker.script = fail
    async with (
        live_gateway(bus, first_event_timeout_s=0.05, ping_interval_s=0.05) as gateway,
        gateway.openai.responses.stream(model=MODEL, input="one") as stream,
    ):
        has_begun.set()
        events = [event async for event in stream]

    assert [(event.sequence_number, event.type) for event in events] == [
        (0, "response.created"),
        (1, "response.in_progress"),
        (2, "response.failed"),
    ]


async def test_parameters_reach_the_worker(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    response = await gateway.openai.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "one"}]}],
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        text={"format": {"type": "json_object"}},
        metadata={"a": "b"},
        extra_body={"seed": 3, "top_k": 5},
    )

    sampling, prompt = worker.jobs[0].job.sampling, worker.jobs[0].job.prompts[0]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.seed, sampling.top_k) == (3, 5)
    assert sampling.constraint is not None
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["Be brief.", "one"]
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})


async def test_small_parameters_are_honoured(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    message = {"type": "message", "role": "assistant", "content": [refusal]}

    response = await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=[message, {"role": "user", "content": "one"}],
        text={"verbosity": "low"},
        max_tool_calls=3,
    )

    prompt = worker.jobs[0].job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["No.", "one"]
    assert prompt.template_kwargs == {"verbosity": "low"}
    assert response.json()["max_tool_calls"] == 3


async def test_allowed_tools_are_the_only_ones_that_are_called(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    tools = [{**TOOL, "name": name} for name in ("f", "g")]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}],
    }

    await gateway.post("/v1/responses", model=MODEL, input="one", tools=tools, tool_choice=choice)

    job = worker.jobs[0].job
    assert isinstance(job.prompts[0], ChatPrompt)
    assert [tool.name for tool in job.prompts[0].tools] == ["f", "g"]
    assert job.sampling.constraint is not None
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    assert matches(job.sampling.constraint, call)
    assert not matches(job.sampling.constraint, call.replace('"g"', '"f"'))


async def test_a_background_response_goes_on_alone(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    """It is queued, in progress and completed, and can be read at any time."""
    may_end = wait_before_the_end(worker, "one ", "two")
    queued = await gateway.openai.responses.create(model=MODEL, input="x", background=True)
    assert queued.status == "queued"

    async def has_begun() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).output_text == "one "

    await eventually(has_begun)
    assert (await gateway.openai.responses.retrieve(queued.id)).status == "in_progress"
    may_end.set()

    async def is_completed() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).status == "completed"

    await eventually(is_completed)
    response = await gateway.openai.responses.retrieve(queued.id)
    assert response.output_text == "one two"
    assert response.model == MODEL


@pytest.mark.parametrize("kept", [{"background": True}, {"store": True}])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_failed_is_there_as_long_as_one_that_did_not(
    gateway: LiveGateway, worker: ScriptedWorker, kept: dict[str, bool], stream: bool
) -> None:
    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await job.fail("worker_lost", "gone")

    worker.script = fail
    body = {"model": MODEL, "input": "x", "stream": stream, **kept}
    response_id = (await gateway.post("/v1/responses", **body)).headers["x-request-id"]
    await worker.wait_until(lambda: bool(worker.jobs) and not worker.num_running)

    for _ in range(2):
        again = await gateway.openai.responses.retrieve(response_id)
        assert again.status == "failed"
        assert again.error is not None
        assert (again.error.code, again.output_text) == ("server_error", "one ")
        assert again.error.model_dump()["reason"] == "worker_lost"
        item: Any = again.output[0]
        assert item.status == "incomplete"
        events = [
            e async for e in await gateway.openai.responses.retrieve(response_id, stream=True)
        ]
        assert events[-1].type == "response.failed"


async def test_a_stored_stream_is_read_again_behind_what_was_seen(gateway: LiveGateway) -> None:
    """``starting_after`` is the number of the last event that was received."""
    stream = await gateway.openai.responses.create(
        model=MODEL, input="one two three", store=True, stream=True
    )
    events = [event async for event in stream]
    first: Any = events[0]

    again = await gateway.openai.responses.retrieve(
        first.response.id, stream=True, starting_after=4
    )

    assert [event async for event in again] == events[5:]


async def test_a_background_response_is_cancelled(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await worker.wait_cancelled(job.job.request_id)

    worker.script = say_one_word
    queued = await gateway.openai.responses.create(model=MODEL, input="x", background=True)
    await worker.wait_until(lambda: bool(worker.jobs))

    async def has_begun() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).output_text == "one "

    await eventually(has_begun)
    cancelled = await gateway.openai.responses.cancel(queued.id)

    item: Any = cancelled.output[0]
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "one ")
    assert item.status == "incomplete"
    await worker.wait_until(lambda: worker.num_running == 0)
    assert await gateway.openai.responses.retrieve(queued.id) == cancelled


ROUTES = [
    ("GET", "/v1/responses/{}"),
    ("GET", "/v1/responses/{}?stream=true"),
    ("POST", "/v1/responses/{}/cancel"),
    ("DELETE", "/v1/responses/{}"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_what_is_no_response_is_not_found(
    gateway: LiveGateway, method: str, path: str
) -> None:
    chat = await gateway.chat(detach=True)
    stream_id = chat.headers["x-request-id"]

    for other in (stream_id, "nonsense", "resp_" + "0" * 32):
        answer = await gateway.http.request(method, path.format(other))
        assert answer.status_code == 404
        assert "response" in answer.json()["error"]["message"].lower()

    assert (await gateway.http.get(f"/v1/streams/{stream_id}")).status_code == 200


async def test_a_deadline_leaves_what_is_open_incomplete(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def never_end(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await worker.wait_cancelled(job.job.request_id)

    worker.script = never_end
    stream = await gateway.openai.responses.create(
        model=MODEL, input="x", stream=True, store=False, extra_body={"timeout": 60}
    )
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            skip(60)

    last: Any = events[-1]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.failed",
    ]
    assert [item.status for item in last.response.output] == ["incomplete"]


async def test_an_agents_prompt_may_be_long(gateway: LiveGateway) -> None:
    tools = [{**TOOL, "name": f"f{k}", "description": "x" * 900} for k in range(100)]

    response = await gateway.post(
        "/v1/responses",
        model=MODEL,
        input="one",
        instructions="x" * 70_000,
        tools=tools,
        tool_choice="none",
    )

    assert response.status_code == 200
    assert len(response.json()["instructions"]) == 70_000
    assert len(response.json()["tools"]) == 100
