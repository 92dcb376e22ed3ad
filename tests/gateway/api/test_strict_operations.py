"""The answers of every operation have the types of OpenAI's and Anthropic's packages, with nothing
missing, nothing added and nothing of another type; errors, too."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from openai.types.webhooks import UnwrapWebhookEvent

from gateway.app import create_app
from gateway.intake.keys.api_key import SCOPES
from gateway.intake.keys.key_file import KeyFile
from shared import settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Failed
from shared.settings import GatewaySettings
from tests.support.gateway.batches import ENDED, chat, jsonl
from tests.support.gateway.http import LiveGateway, eventually, live_gateway
from tests.support.gateway.webhooks import receiving
from tests.support.strictness.answers import (
    ANSWERS,
    UNTYPED_OPERATIONS,
    OutputLine,
    faults,
    operation_of,
)
from tests.support.strictness.types import problems
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    ScriptedWorker,
    repeat_the_prompt,
    start_only,
    words,
)

CALL = '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = {"tools": [{"type": "function", "name": "f", "parameters": {}}]}
HISTORY: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "system", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"role": "user", "content": "one"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "three"},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "four"},
    {"role": "user", "content": CALL},
]
UPLOAD = {"bytes": 4, "filename": "a", "mime_type": "application/jsonl", "purpose": "batch"}


class Visits:
    """Requests, whose answers are kept."""

    def __init__(self, gateway: LiveGateway) -> None:
        self.answers: list[httpx.Response] = []
        self._http = gateway.http

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Returns the JSON of an answer."""
        answer = await self._http.request(method, path, json=body, **more)
        self.answers.append(answer)
        return answer.json() if answer.text.startswith("{") else None

    @property
    def operations(self) -> set[str]:
        """The operations that have answered well."""
        return {operation_of(answer) for answer in self.answers if answer.status_code == 200}

    @property
    def faults(self) -> dict[str, str]:
        return {fault: data for answer in self.answers for fault, data in faults(answer).items()}


@pytest.fixture
def parsers() -> dict[str, str]:
    return {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture
def gateway_options() -> dict[str, str]:
    return {"webhook_networks": "127.0.0.0/8"}


@pytest.fixture
def visits(gateway: LiveGateway) -> Visits:
    return Visits(gateway)


def operations_of(*prefixes: str) -> set[str]:
    return {name for name in ANSWERS if name.split()[1].startswith(prefixes)}


def test_every_operation_has_a_type() -> None:
    loaded = settings.load(GatewaySettings, port=0)
    document = create_app(loaded, MemoryBus(MemoryBroker())).openapi()

    operations = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }

    own = ("/admin/v1/", "/health", "/live", "/metrics")
    others = {name for name in operations if name.split()[1].startswith(own)} - {*ANSWERS}
    assert operations - others == {*ANSWERS, *UNTYPED_OPERATIONS}


ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
ADDED = {
    "type": "response.output_item.added",
    "output_index": 0,
    "sequence_number": 1,
    "item": ITEM,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "response.output_item.begun"},
        {"output_index": "0"},
        {"sequence_number": None},
        {"unknown": 1},
        {"item": {**ITEM, "unknown": 1}},
        {"item": {**ITEM, "type": "message"}},
        {"item": {**ITEM, "arguments": {}}},
        {"item": {name: value for name, value in ITEM.items() if name != "name"}},
    ],
)
def test_what_is_wrong_is_found(wrong: dict[str, Any]) -> None:
    assert problems(ResponseStreamEvent, json.dumps(ADDED)) == []
    assert problems(ResponseStreamEvent, json.dumps({**ADDED, **wrong})) != []


async def test_responses_and_conversations(visits: Visits, gateway: LiveGateway) -> None:
    ask, asked = visits.ask, {"model": MODEL, **TOOLS}
    conversation = await ask(
        "POST", "/v1/conversations", {"items": HISTORY, "metadata": {"a": "b"}}
    )
    place = f"/v1/conversations/{conversation['id']}"
    for stream in (False, True):
        body = {**asked, "input": CALL, "stream": stream, "conversation": conversation["id"]}
        await ask("POST", "/v1/responses", body)
    first = await ask("POST", "/v1/responses", {**asked, "input": HISTORY})
    body = {**asked, "input": "x", "previous_response_id": first["id"]}
    second = f"/v1/responses/{(await ask('POST', '/v1/responses', body))['id']}"
    await ask("POST", "/v1/responses/input_tokens", {**asked, "input": HISTORY})
    await ask("GET", second)
    await ask("GET", f"{second}?stream=true")
    for query in ("limit=100", "limit=1&order=asc", "after=unknown"):
        await ask("GET", f"{second}/input_items?{query}")
    await ask("DELETE", second)
    await ask("GET", place)
    await ask("POST", place, {"metadata": {"c": "d"}})
    for item in (await ask("GET", f"{place}/items?limit=100"))["data"]:
        await ask("GET", f"{place}/items/{item['id']}")
        await ask("DELETE", f"{place}/items/{item['id']}")
    await ask("GET", f"{place}/items")
    await ask("POST", f"{place}/items", {"items": HISTORY})
    await ask("DELETE", place)

    missing = operations_of("/v1/responses", "/v1/conversations") - visits.operations
    assert missing == {"POST /v1/responses/{response_id}/cancel"}
    assert visits.faults == {}


async def fail_in_the_middle(job: ScriptedJob) -> None:
    await job.start()
    await job.say("one")
    await job.fail("internal_error", "Broken.")


async def cut_off(job: ScriptedJob) -> None:
    await job.start()
    await job.finish("one", reason="length")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (repeat_the_prompt, "completed"),
        (cut_off, "incomplete"),
        (fail_in_the_middle, "failed"),
        (start_only, "in_progress"),
    ],
)
async def test_background_responses_and_their_webhooks(
    visits: Visits, worker: ScriptedWorker, script: Any, status: str
) -> None:
    ask, worker.script = visits.ask, script
    async with receiving() as receiver:
        await ask("POST", "/admin/v1/webhooks", {"url": receiver.url})
        body = {"model": MODEL, "input": CALL, **TOOLS, "background": True}
        path = f"/v1/responses/{(await ask('POST', '/v1/responses', body))['id']}"

        async def is_there() -> bool:
            return bool((await ask("GET", path))["status"] == status)

        await eventually(is_there)
        await ask("POST", f"{path}/cancel")
        await ask("GET", path)
        (event,) = await receiver.wait()

    assert problems(UnwrapWebhookEvent, event.body) == []
    assert "POST /v1/responses/{response_id}/cancel" in visits.operations
    assert visits.faults == {}


async def refuse_long_ones(job: ScriptedJob) -> None:
    if words(job.job.prompts[0]) == ["long"]:
        await job.publish(Failed(code="context_length_exceeded", message="Too long."))
    else:
        await repeat_the_prompt(job)


async def test_files_uploads_and_batches(
    visits: Visits, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    ask = visits.ask
    worker.script = refuse_long_ones
    lines = [chat("a"), chat("b", CALL), chat("c", "long")]
    form: Any = {"files": {"file": ("in.jsonl", jsonl(lines))}, "data": {"purpose": "batch"}}
    file = await ask("POST", "/v1/files", **form)
    form["files"] = {"file": ("in.jsonl", jsonl(["no JSON", "{}"]))}
    bad_file = await ask("POST", "/v1/files", **form)
    order = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"a": "b"}}

    async def until_ended(batch: Any) -> Any:
        async def is_ended() -> bool:
            return (await ask("GET", f"/v1/batches/{batch['id']}"))["status"] in ENDED

        await eventually(is_ended)
        return await ask("GET", f"/v1/batches/{batch['id']}")

    async with receiving() as receiver:
        await ask("POST", "/admin/v1/webhooks", {"url": receiver.url})
        done = await until_ended(
            await ask("POST", "/v1/batches", {**order, "input_file_id": file["id"]})
        )
        await until_ended(
            await ask("POST", "/v1/batches", {**order, "input_file_id": bad_file["id"]})
        )
        worker.script = start_only
        order["completion_window"] = "1s"
        expired = await until_ended(
            await ask("POST", "/v1/batches", {**order, "input_file_id": file["id"]})
        )
        order["completion_window"] = "1h"
        batch = await ask("POST", "/v1/batches", {**order, "input_file_id": file["id"]})
        cancelled = await ask("POST", f"/v1/batches/{batch['id']}/cancel")
        cancelled = await until_ended(cancelled)
        events = await receiver.wait(4)
    await ask("GET", "/v1/batches")
    await ask("GET", "/v1/files?limit=1")
    await ask("GET", f"/v1/files/{file['id']}")
    upload = f"/v1/uploads/{(await ask('POST', '/v1/uploads', UPLOAD))['id']}"
    part = await ask("POST", f"{upload}/parts", files={"data": b"1234"})
    await ask("POST", f"{upload}/complete", {"part_ids": [part["id"]]})
    other = await ask("POST", "/v1/uploads", UPLOAD)
    await ask("POST", f"/v1/uploads/{other['id']}/cancel")
    contents = [
        (await gateway.http.get(f"/v1/files/{batch[name]}/content")).text
        for batch in (done, expired, cancelled)
        for name in ("output_file_id", "error_file_id")
        if batch[name] is not None
    ]
    await ask("DELETE", f"/v1/files/{file['id']}")

    assert (done["status"], expired["status"]) == ("completed", "expired")
    lines_out = [line for content in contents for line in content.splitlines()]
    assert {fault for line in lines_out for fault in problems(OutputLine, line)} == set()
    assert {json.loads(line)["custom_id"] for line in lines_out} == {"a", "b", "c"}
    assert {
        fault for event in events for fault in problems(UnwrapWebhookEvent, event.body)
    } == set()
    missing = operations_of("/v1/files", "/v1/uploads", "/v1/batches") - visits.operations
    assert missing == set()
    assert visits.faults == {}


async def test_webhooks(visits: Visits) -> None:
    ask = visits.ask
    async with receiving() as receiver:
        made = await ask("POST", "/admin/v1/webhooks", {"url": receiver.url, "tenant": "a"})
        path = f"/admin/v1/webhooks/{made['id']}"
        await ask("GET", "/admin/v1/webhooks")
        await ask("GET", path)
        await ask("POST", path, {"name": "b"})
        await ask("POST", f"{path}/rotate_secret", {})
        await ask("POST", f"{path}/test", {"event_type": "batch.completed"})
        (event,) = await receiver.wait()
        await ask("DELETE", path)

    assert problems(UnwrapWebhookEvent, event.body) == []
    assert operations_of("/admin/v1/webhooks") - visits.operations == set()
    assert visits.faults == {}


async def test_models_embeddings_and_counts(visits: Visits) -> None:
    ask = visits.ask
    await ask("GET", "/v1/models")
    await ask("GET", f"/v1/models/{MODEL}")
    for more in ({}, {"encoding_format": "base64"}, {"dimensions": 2}, {"dimensions": 99}):
        await ask("POST", "/v1/embeddings", {"model": MODEL, "input": ["one", "two"], **more})
    messages = [{"role": "user", "content": "one"}]
    await ask("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": messages})

    assert operations_of("/v1/models", "/v1/embeddings", "/v1/messages/count_tokens") == (
        visits.operations
    )
    assert visits.faults == {}


async def test_errors_have_the_form_of_their_api(closed: LiveGateway) -> None:
    visits, key = Visits(closed), {"Authorization": f"Bearer {closed.openai.api_key}"}
    text = {**key, "content-type": "text/plain"}
    for operation in ANSWERS:
        method, path = operation.replace("{", "").replace("}", "").split()
        await visits.ask(method, path)
        for body in (None, {"model": "unknown", "input": "x", "messages": []}, [1]):
            await visits.ask(method, path, body, headers=key)
        await visits.ask(method, path, content=b"{", headers=text)

    statuses = {answer.status_code for answer in visits.answers}
    assert {400, 401, 404} <= statuses <= {200, 400, 401, 404, 415}
    assert visits.faults == {}


@pytest.fixture
async def closed(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[LiveGateway]:
    """A gateway that requires an API key, which its client of OpenAI has."""
    file = KeyFile(tmp_path / "keys")
    key = file.add("alice", scopes=SCOPES)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        gateway.openai.api_key = key
        yield gateway
