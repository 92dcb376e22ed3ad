"""Stored responses and conversations, through the official client."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from gateway.api.event_stream import ClientGone
from gateway.api.routes import generation
from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import ChatMessage, ChatPrompt, Failed, QuickAnswer, QuickJob, TokenizeJob
from tests.support.gateway.http import LiveGateway, eventually, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    count_words,
    wait_before_the_end,
)

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
UNKNOWN = "0" * 32


@pytest.fixture(params=["sqlite", "postgresql"])
async def stored(
    request: pytest.FixtureRequest, bus: MemoryBus, worker: ScriptedWorker
) -> AsyncIterator[LiveGateway]:
    """A gateway on either database."""
    options = {}
    if request.param == "postgresql":
        options["database_url"] = request.getfixturevalue("postgres").create_database()
    async with live_gateway(bus, **options) as gateway:
        yield gateway


def prompt_of(job: ScriptedJob) -> list[tuple[str, str]]:
    (prompt,) = job.job.prompts
    assert isinstance(prompt, ChatPrompt)
    return [(message.role, message.content) for message in prompt.messages]


def messages_of(job: ScriptedJob) -> tuple[ChatMessage, ...]:
    (prompt,) = job.job.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def strict(value: Any) -> Any:
    """The same, checked against the client's own types."""
    return type(value).model_validate(value.model_dump(), strict=True)


def reference(item_id: str | None) -> Any:
    return {"type": "item_reference", "id": item_id}


async def say(gateway: LiveGateway, text: Any, **more: Any) -> Response:
    response: Response = await gateway.openai.responses.create(model=MODEL, input=text, **more)
    return response


async def forget_log(bus: MemoryBus, response_id: str) -> None:
    """Delete the log of a response, as the broker does when it expires."""
    await bus.delete_queue(topology.reply_queue(response_id, 0.0).name)


async def test_a_response_continues_those_before_it(
    stored: LiveGateway, worker: ScriptedWorker
) -> None:
    first = await say(stored, "one", instructions="Be brief.")
    second = await say(stored, "two", previous_response_id=first.id)
    third = await say(stored, "three", previous_response_id=second.id, instructions="Be loud.")

    assert first.id.startswith("resp_")
    assert str(first.output[0].id).startswith("msg_")
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    assert prompt_of(worker.jobs[2]) == [
        ("system", "Be loud."),
        ("user", "one"),
        ("assistant", "one"),
        ("user", "two"),
        ("assistant", "two"),
        ("user", "three"),
    ]
    assert await stored.openai.responses.retrieve(third.id) == third
    assert strict(third).model_dump()["store"] is True


@pytest.mark.parametrize("said", [{}, {"input": None}, {"input": []}])
async def test_a_response_needs_no_input_of_its_own(
    gateway: LiveGateway, worker: ScriptedWorker, said: dict[str, Any]
) -> None:
    first = await say(gateway, "one")

    async def status(path: str = "/v1/responses", **more: Any) -> int:
        return (await gateway.post(path, model=MODEL, **said, **more)).status_code

    assert await status(previous_response_id=first.id) == 200
    assert await status(instructions="Be brief.") == 200
    assert await status("/v1/responses/input_tokens", instructions="Be brief.") == 200
    assert await status() == 400
    assert await status("/v1/responses/input_tokens") == 400

    assert [prompt_of(job) for job in worker.jobs[1:]] == [
        [("user", "one"), ("assistant", "one")],
        [("system", "Be brief.")],
    ]


async def test_the_tokens_of_a_continued_response_are_counted(
    stored: LiveGateway, worker: ScriptedWorker
) -> None:
    asked: list[QuickJob] = []

    def count_words_of(job: QuickJob) -> QuickAnswer | Failed:
        asked.append(job)
        return count_words(job)

    worker.quick_script = count_words_of
    conversation = await stored.openai.conversations.create()
    first = await say(stored, "one", conversation=conversation.id)
    count = stored.openai.responses.input_tokens.count

    await count(model=MODEL, input="two", previous_response_id=first.id)
    await count(model=MODEL, input="two", conversation=conversation.id)
    items: Any = [reference(first.output[0].id), {"role": "user", "content": "two"}]
    await count(model=MODEL, input=[{"role": "user", "content": "one"}, *items])

    for job in asked:
        assert isinstance(job, TokenizeJob)
        assert isinstance(job.prompt, ChatPrompt)
        assert [message.content for message in job.prompt.messages] == ["one", "one", "two"]
    assert len(asked) == 3
    with pytest.raises(openai.NotFoundError):
        await count(model=MODEL, input="two", conversation=f"conv_{UNKNOWN}")


async def test_a_refusal_is_stored_and_continued(
    stored: LiveGateway, worker: ScriptedWorker
) -> None:
    part = {"type": "refusal", "refusal": "No."}
    message = {"type": "message", "role": "assistant", "content": [part]}
    first = await say(stored, [message, {"role": "user", "content": "one"}])

    await say(stored, "two", previous_response_id=first.id)

    assert prompt_of(worker.jobs[1])[0] == ("assistant", "No.")
    items = await stored.openai.responses.input_items.list(first.id, order="asc")
    assert items.model_dump()["data"][0]["content"] == [part]


async def test_the_items_of_a_response_come_in_pages(stored: LiveGateway) -> None:
    first = await say(stored, "one")
    second = await say(
        stored,
        [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
        previous_response_id=first.id,
    )

    def texts(page: Any) -> list[str]:
        return [item.content[0].text for item in page.data]

    items = stored.openai.responses.input_items
    newest = strict(await items.list(second.id, limit=2))
    oldest = await items.list(second.id, order="asc")
    rest = [item async for item in items.list(second.id, limit=1)]

    assert (texts(newest), newest.has_more) == (["three", "two"], True)
    assert (texts(oldest), oldest.has_more) == (["one", "one", "two", "three"], False)
    assert [item.id for item in rest] == [item.id for item in reversed(oldest.data)]
    assert {item.id.partition("_")[0] for item in rest} == {"msg"}


async def test_the_responses_of_a_tenant_are_listed_in_pages(stored: LiveGateway) -> None:
    made = [await stored.openai.responses.create(model=MODEL, input="a") for _ in range(3)]

    first = (await stored.http.get("/v1/responses", params={"limit": 2})).json()
    after = {"after": first["last_id"]}
    rest = (await stored.http.get("/v1/responses", params=after)).json()

    listed = [*first["data"], *rest["data"]]
    assert {one["id"] for one in listed} == {response.id for response in made}
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert {one["object"] for one in listed} == {"response"}


async def test_a_conversation_is_kept_in_both_directions(
    stored: LiveGateway, worker: ScriptedWorker
) -> None:
    conversations = stored.openai.conversations
    opening: Any = [{"role": "developer", "content": "Be brief."}]
    conversation = strict(await conversations.create(items=opening, metadata={"topic": "a"}))

    answer = await say(stored, "one", conversation=conversation.id)
    await say(stored, "two", conversation={"id": conversation.id})

    assert conversation.id.startswith("conv_")
    assert answer.conversation is not None
    assert answer.conversation.id == conversation.id
    assert prompt_of(worker.jobs[1]) == [
        ("developer", "Be brief."),
        ("user", "one"),
        ("assistant", "one"),
        ("user", "two"),
    ]
    listed = strict(await conversations.items.list(conversation.id, order="asc"))
    assert [item.content[0].text for item in listed.data] == [
        "Be brief.",
        "one",
        "one",
        "two",
        "two",
    ]
    of_first = await stored.openai.responses.input_items.list(answer.id, order="asc")
    assert [item.id for item in of_first.data] == [item.id for item in listed.data[:2]]


async def test_a_conversation_is_changed_and_deleted(gateway: LiveGateway) -> None:
    conversations = gateway.openai.conversations
    conversation = await conversations.create()

    empty = await conversations.items.list(conversation.id)
    updated = await conversations.update(conversation.id, metadata={"topic": "b"})
    made: Any = await conversations.items.create(
        conversation.id,
        items=[
            {"role": "user", "content": "one"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
    )
    one: Any = strict(
        await conversations.items.retrieve(made.data[0].id, conversation_id=conversation.id)
    )
    left = await conversations.items.delete(made.data[1].id, conversation_id=conversation.id)
    listed = await conversations.items.list(conversation.id)
    deleted = await conversations.delete(conversation.id)

    assert (empty.data, empty.has_more) == ([], False)
    assert updated.metadata == {"topic": "b"}
    assert (one.content[0].text, one.content[0].type) == ("one", "input_text")
    assert [item.type for item in made.data] == ["message", "function_call", "function_call_output"]
    assert left.id == conversation.id
    assert [item.id for item in listed.data] == [made.data[2].id, made.data[0].id]
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        await say(gateway, "one", conversation=conversation.id)


async def test_a_streamed_response_is_continued_as_soon_as_it_ends(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    stream = await gateway.openai.responses.create(model=MODEL, input="one two", stream=True)
    async for event in stream:
        if event.type == "response.completed":
            first = event.response
            break
    second = await say(gateway, "three", previous_response_id=first.id)

    assert second.status == "completed"
    assert prompt_of(worker.jobs[1])[:2] == [("user", "one two"), ("assistant", "one two")]
    assert await gateway.openai.responses.retrieve(first.id) == first


async def think_and_call(job: ScriptedJob) -> None:
    await job.start()
    await job.say("<think>Which one?</think>")
    await job.finish('<tool_call>{"name": "f", "arguments": {}}</tool_call>')


@pytest.mark.parametrize(
    "parsers", [{"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}], ids=["parsers"]
)
async def test_a_call_is_answered_in_the_next_response(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = think_and_call
    await hears_a_worker(gateway)
    first = await say(gateway, "one", tools=[TOOL])
    call: Any = first.output[-1]
    worker.script = ScriptedWorker(worker.bus).script
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    await say(gateway, [output], tools=[TOOL], previous_response_id=first.id)

    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert [str(item.id).partition("_")[0] for item in first.output] == ["rs", "fc"]
    user, assistant, tool = messages_of(worker.jobs[1])
    assert (user.content, tool.content, tool.tool_call_id) == ("one", "42", call.call_id)
    assert [(made.id, made.name) for made in assistant.tool_calls] == [(call.call_id, "f")]
    assert assistant.reasoning_content == "Which one?"


@pytest.mark.parametrize(
    "parsers", [{"tool_parser": "hermes", "reasoning_parser": "qwen3"}], ids=["parsers"]
)
async def test_references_stand_for_the_output_of_stored_responses(
    stored: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(stored)
    greeting = await say(stored, "Hello.")
    default, worker.script = worker.script, think_and_call
    called = await say(stored, "one", tools=[TOOL])
    worker.script = default
    call: Any = called.output[-1]
    said: Any = [
        {"role": "user", "content": "Hello."},
        *(reference(item.id) for item in greeting.output),
        {"role": "user", "content": "one"},
        *(reference(item.id) for item in called.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]

    answer = await say(stored, said, tools=[TOOL])

    *greeted, assistant, tool = messages_of(worker.jobs[2])
    assert [(message.role, message.content) for message in greeted] == [
        ("user", "Hello."),
        ("assistant", "Hello."),
        ("user", "one"),
    ]
    assert (tool.content, tool.tool_call_id) == ("42", call.call_id)
    assert [(made.id, made.name) for made in assistant.tool_calls] == [(call.call_id, "f")]
    assert assistant.reasoning_content == "Which one?"
    listed = await stored.openai.responses.input_items.list(answer.id, order="asc")
    assert [item.type for item in listed.data] == [
        "message",
        "message",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]


async def test_a_reference_to_an_unknown_item_is_refused_with_its_id(gateway: LiveGateway) -> None:
    forgotten = await say(gateway, "one", store=False)
    known = await say(gateway, "one")
    unknown = [forgotten.output[0].id, f"msg_{UNKNOWN}0", f"{known.output[0].id}0", known.id, "x"]

    for item_id in unknown:
        with pytest.raises(openai.BadRequestError) as refused:
            await say(gateway, [reference(item_id)])
        assert f"Item with id '{item_id}' not found." in refused.value.message
        assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError) as refused:
        await say(gateway, [{"type": "item_reference"}])
    assert refused.value.param == "input[0].id"


async def test_many_references_to_a_long_item_are_too_long(gateway: LiveGateway) -> None:
    answer = await say(gateway, "x" * 5000)

    # Without OpenAI's client, which takes seconds to look at so many items.
    references = [reference(answer.output[0].id)] * 4000
    refused = await gateway.post("/v1/responses", model=MODEL, input=references)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_response_that_is_not_stored_cannot_be_continued(gateway: LiveGateway) -> None:
    response = await say(gateway, "one", store=False)

    assert response.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await say(gateway, "two", previous_response_id=response.id)
    assert response.id in refused.value.message
    assert refused.value.param == "previous_response_id"


async def test_a_deleted_response_is_gone(gateway: LiveGateway) -> None:
    first = await say(gateway, "one")
    second = await say(gateway, "two", previous_response_id=first.id)

    await gateway.openai.responses.delete(first.id)

    for attempt in (
        gateway.openai.responses.retrieve(first.id),
        gateway.openai.responses.delete(first.id),
        say(gateway, "three", previous_response_id=second.id),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await attempt
        assert refused.value.code in ("not_found", "previous_response_not_found")
        assert first.id in refused.value.message
    assert await gateway.openai.responses.retrieve(second.id) == second


async def test_a_tenant_reaches_its_own_responses_and_conversations_only(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    mine, other = (keys.add(tenant) for tenant in ("me", "other"))
    async with live_gateway(bus, keys_file=tmp_path / "keys") as gateway:
        me, stranger = (gateway.openai.with_options(api_key=key) for key in (mine, other))
        conversation = await me.conversations.create(items=[{"role": "user", "content": "one"}])
        response = await me.responses.create(model=MODEL, input="one", conversation=conversation.id)
        item: Any = (await me.conversations.items.list(conversation.id)).data[0]
        attempts: list[Any] = [
            stranger.responses.retrieve(response.id),
            stranger.responses.delete(response.id),
            stranger.responses.input_items.list(response.id),
            stranger.responses.create(model=MODEL, input="x", conversation=conversation.id),
            stranger.conversations.retrieve(conversation.id),
            stranger.conversations.update(conversation.id, metadata={}),
            stranger.conversations.delete(conversation.id),
            stranger.conversations.items.list(conversation.id),
            stranger.conversations.items.create(conversation.id, items=[]),
            stranger.conversations.items.retrieve(item.id, conversation_id=conversation.id),
            stranger.conversations.items.delete(item.id, conversation_id=conversation.id),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.BadRequestError, match="not found"):
            await stranger.responses.create(
                model=MODEL, input="x", previous_response_id=response.id
            )
        with pytest.raises(openai.BadRequestError, match="not found"):
            await stranger.responses.create(model=MODEL, input=[reference(response.output[0].id)])

        assert await me.responses.retrieve(response.id) == response
        assert len((await me.conversations.items.list(conversation.id)).data) == 3


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (
            {"previous_response_id": f"resp_{UNKNOWN}"},
            400,
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"conversation": f"conv_{UNKNOWN}"}, 404, "not_found", "conversation"),
        ({"conversation": f"conv_{UNKNOWN}", "store": False}, 400, "invalid_request", "store"),
        (
            {"conversation": f"conv_{UNKNOWN}", "previous_response_id": f"resp_{UNKNOWN}"},
            400,
            "invalid_request",
            "previous_response_id",
        ),
        ({"input": [{"type": "unknown"}]}, 400, "invalid_request", "input[0].type"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    gateway: LiveGateway,
    worker: ScriptedWorker,
    body: dict[str, Any],
    status: int,
    code: str,
    param: str,
) -> None:
    answer = await gateway.post("/v1/responses", **{"model": MODEL, "input": "x", **body})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert worker.jobs == []


async def test_a_response_in_progress_cannot_be_continued_yet(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker, last="two")
    queued = await say(gateway, "one", background=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await say(gateway, "three", previous_response_id=queued.id)
    may_end.set()

    assert "has not ended" in refused.value.message

    async def is_completed() -> bool:
        return (await gateway.openai.responses.retrieve(queued.id)).status == "completed"

    await eventually(is_completed)
    worker.script = ScriptedWorker(worker.bus).script
    await say(gateway, "three", previous_response_id=queued.id)
    assert prompt_of(worker.jobs[1]) == [("user", "one"), ("assistant", "two"), ("user", "three")]


async def test_what_the_client_leaves_is_stored_if_it_said_so(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker, "one ", "two")
    body = {"model": MODEL, "input": "x", "stream": True, "store": True}
    async with gateway.http.stream("POST", "/v1/responses", json=body) as stream:
        response_id = stream.headers["x-request-id"]
        async for line in stream.aiter_lines():
            if "one" in line:
                break
    may_end.set()

    await completed_by_itself(gateway)
    response = await gateway.openai.responses.retrieve(response_id)
    assert (response.status, response.output_text) == ("completed", "one two")


async def completed_by_itself(gateway: LiveGateway) -> None:
    """Wait until the gateway has stored a response that no client has asked for."""

    async def is_stored() -> bool:
        return await gateway.sample("warren_gateway_responses_stored_total") == 1

    await eventually(is_stored)


async def test_what_the_client_leaves_is_cancelled_and_forgotten_otherwise(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await worker.wait_cancelled(job.job.request_id)

    worker.script = say_one_word
    body = {"model": MODEL, "input": "x", "stream": True}
    async with gateway.http.stream("POST", "/v1/responses", json=body) as stream:
        response_id = stream.headers["x-request-id"]
        async for line in stream.aiter_lines():
            if "one" in line:
                break
    await worker.wait_until(lambda: bool(worker.jobs) and not worker.num_running)

    async def is_gone() -> bool:
        return (await gateway.http.get(f"/v1/responses/{response_id}")).status_code == 404

    await eventually(is_gone)


async def test_nothing_is_stored_of_a_request_that_the_worker_refuses(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def refuse(job: ScriptedJob) -> None:
        await job.publish(Failed(code="context_length_exceeded", message="Too long."))

    worker.script = refuse
    answer = await gateway.post("/v1/responses", model=MODEL, input="one")
    response_id = answer.headers["x-request-id"]

    assert answer.status_code == 400
    assert (await gateway.http.get(f"/v1/responses/{response_id}/input_items")).status_code == 404


async def test_a_key_whose_log_has_expired_leaves_the_stored_answer_as_it_is(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    key: Any = {"extra_headers": {"Idempotency-Key": "k"}}
    first = await say(gateway, "one", **key)
    await forget_log(bus, first.id)

    with pytest.raises(openai.APIStatusError) as refused:
        await say(gateway, "two", **key)

    assert (refused.value.status_code, refused.value.code) == (410, "stream_expired")
    assert f"GET /v1/responses/{first.id}" in refused.value.message
    assert len(worker.jobs) == 1
    assert await gateway.openai.responses.retrieve(first.id) == first


@pytest.mark.parametrize("size", [1, 64 << 10])
async def test_what_is_nested_too_deeply_to_be_repeated_is_refused(
    gateway: LiveGateway, worker: ScriptedWorker, size: int
) -> None:
    nested = "[" * 300 + "]" * 300
    body = f'{{"model":"{MODEL}","input":"{"a" * size}","metadata":{{"a":{nested}}}}}'

    headers = {"content-type": "application/json"}
    answer = await gateway.http.post("/v1/responses", content=body, headers=headers)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
    assert worker.jobs == []


async def test_a_client_that_leaves_before_its_job_is_published_leaves_no_response(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(_: object) -> None:
        raise ClientGone

    monkeypatch.setattr(generation, "require_client", leave)
    async with live_gateway(bus, data_dir=tmp_path) as gateway:
        with pytest.raises(openai.InternalServerError):
            await say(gateway, "one", extra_headers={"Idempotency-Key": "k"})

        with closing(sqlite3.connect(tmp_path / "warren.db")) as database:
            assert database.execute("SELECT count(*) FROM responses").fetchone() == (0,)
    assert worker.jobs == []


async def test_a_stream_that_failed_and_is_sent_again_is_stored_anew(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    may_fail = asyncio.Event()

    async def fail(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await may_fail.wait()
        await job.fail("internal_error", "Broken.")

    succeed, worker.script = worker.script, fail
    key = {"Idempotency-Key": "k"}
    conversation = await gateway.openai.conversations.create()
    body = {"model": MODEL, "input": "one", "stream": True, "conversation": conversation.id}
    async with gateway.http.stream("POST", "/v1/responses", json=body, headers=key) as stream:
        response_id = stream.headers["x-request-id"]
        async for line in stream.aiter_lines():
            if "one" in line:
                may_fail.set()
    stored = await gateway.openai.responses.retrieve(response_id)
    await forget_log(bus, response_id)
    worker.script = succeed
    again = await say(gateway, "two", conversation=conversation.id, extra_headers=key)

    assert (stored.status, again.status, again.id) == ("failed", "completed", response_id)
    assert await gateway.openai.responses.retrieve(again.id) == again
    items: Any = await gateway.openai.conversations.items.list(conversation.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["two", "two"]


async def test_a_gateway_completes_what_another_one_leaves_when_it_dies(
    broker: MemoryBroker, worker: ScriptedWorker, tmp_path: Path
) -> None:
    may_end = wait_before_the_end(worker, "one ", "two")
    body = {"model": MODEL, "input": "x", "stream": True}
    options = {"data_dir": tmp_path, "disconnect_grace_s": 0.2}
    dying = MemoryBus(broker)
    async with (
        MemoryBus(broker) as living,
        live_gateway(living, **options) as second,
        live_gateway(dying, **options) as first,
    ):
        await dying.__aenter__()
        async with first.http.stream("POST", "/v1/responses", json=body) as stream:
            response_id = stream.headers["x-request-id"]
            async for line in stream.aiter_lines():
                if "one" in line:
                    break
            await dying.__aexit__(None, None, None)
        may_end.set()
        await completed_by_itself(second)

        worker.script = ScriptedWorker(worker.bus).script
        await say(second, "three", previous_response_id=response_id)

    assert prompt_of(worker.jobs[-1]) == [
        ("user", "x"),
        ("assistant", "one two"),
        ("user", "three"),
    ]


async def test_a_request_is_answered_without_a_database_unless_it_needs_one(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    async with live_gateway(bus, data_dir=tmp_path / "file") as gateway:
        answer = await say(gateway, "one")
        refused = await gateway.post("/v1/responses", model=MODEL, input="one", store=True)
        num_refused = await gateway.sample("warren_gateway_responses_stored_total")

    assert answer.model_dump()["store"] is False
    assert refused.status_code == 503
    assert num_refused == 1


async def test_a_common_database_without_a_common_storage_is_warned_of(
    bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/common.db"
    for files_url in (None, f"file://{tmp_path}"):
        async with live_gateway(bus, database_url=url, files_url=files_url):
            pass

    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message for message in warnings if "WARREN_FILES_URL" in message] == [
        "files are stored in the data directory, as WARREN_FILES_URL is not set"
    ]


async def test_responses_need_not_be_stored_by_default(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    def files() -> list[Path]:
        return list(tmp_path.iterdir())

    async with live_gateway(bus, data_dir=tmp_path, store_responses=False) as gateway:
        answer = await say(gateway, "one")
        left = files()
        kept = await say(gateway, "one", store=True)
        again = await gateway.openai.responses.retrieve(kept.id)

    assert answer.model_dump()["store"] is False
    assert left == []
    assert again == kept
