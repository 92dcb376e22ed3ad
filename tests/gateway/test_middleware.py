"""What happens to every request: ids, CORS, unexpected errors, its log line, spans."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Exchange, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, chat_body, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

ORIGIN = "https://app.example"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class HaywireBus(MemoryBus):
    """Raises an error that no bus should raise when a reply queue is declared."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        if any(resource.name.startswith("reply.") for resource in resources):
            raise ZeroDivisionError("a secret of /etc/passwd")
        await super().declare(*resources)


async def test_every_response_has_an_id_of_its_own(gateway: LiveGateway) -> None:
    paths = ("/live", "/health", "/v1/models", "/nowhere", "/live")

    ids = [(await gateway.http.get(path)).headers["x-request-id"] for path in paths]

    assert len(set(ids)) == len(paths)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/chat/completions", "/chat/completions/"]
)
async def test_a_path_needs_no_version_and_may_end_with_a_slash(
    gateway: LiveGateway, worker: ScriptedWorker, path: str
) -> None:
    response = await gateway.http.post(path, json=chat_body())

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models", 200),
        ("/models/", 200),
        ("/conversations", 405),
        ("/v1/tokenize", 405),
        ("/v1/tokenize/x", 404),
        ("/live/", 200),
        ("/modelsx", 404),
        ("/nowhere/", 404),
    ],
)
async def test_other_paths_are_what_they_are(gateway: LiveGateway, path: str, status: int) -> None:
    assert (await gateway.http.get(path)).status_code == status


async def test_a_path_without_a_version_needs_a_key_too(bus: MemoryBus, tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys").add("alice")
    async with live_gateway(bus, keys_file=tmp_path / "keys") as gateway:
        statuses = [
            (await gateway.http.get(path)).status_code for path in ("/models", "/models/", "/live/")
        ]

    assert statuses == [401, 401, 200]


async def test_browsers_of_other_origins_are_not_served_by_default(gateway: LiveGateway) -> None:
    response = await gateway.http.post(
        "/v1/chat/completions", json=chat_body(), headers={"origin": ORIGIN}
    )

    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "[::1", "a.b."])
async def test_a_foreign_host_is_refused(gateway: LiveGateway, host: str) -> None:
    response = await gateway.http.get("/v1/models", headers={"host": host})

    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "warren.localhost", "127.0.0.1", "10.0.0.7:8000", "[::1]:8000", "gateway"],
)
async def test_hosts_that_no_foreign_page_has_are_served(gateway: LiveGateway, host: str) -> None:
    response = await gateway.http.get("/v1/models", headers={"host": host})

    assert response.status_code == 200


async def test_configured_hosts_are_served(bus: MemoryBus) -> None:
    async with live_gateway(bus, cors_origins=ORIGIN) as gateway:
        response = await gateway.http.get("/v1/models", headers={"host": "app.example"})

    assert response.status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "https://localhost.evil.example"]
)
async def test_a_foreign_origin_is_refused(gateway: LiveGateway, origin: str) -> None:
    response = await gateway.http.post(
        "/v1/responses/resp-1/cancel", headers={"origin": origin, "host": "localhost"}
    )

    assert response.status_code == 403


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://gateway:8000", "http://[::1]"])
async def test_own_origins_are_served(gateway: LiveGateway, origin: str) -> None:
    headers = {"origin": origin, "host": "gateway:8000"}

    assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200


async def test_with_api_keys_any_site_may_come(bus: MemoryBus, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("alice")
    async with live_gateway(bus, keys_file=file.path) as gateway:
        headers = {"host": "api.example", "origin": ORIGIN, "authorization": f"Bearer {key}"}

        response = await gateway.http.get("/v1/models", headers=headers)

    assert response.status_code == 200


async def test_allowed_origins_are_served_errors_included(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with live_gateway(bus, cors_origins=ORIGIN) as gateway:
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        preflight = await gateway.http.options("/v1/chat/completions", headers=headers)
        error = await gateway.http.post(
            "/v1/chat/completions", json=chat_body(temperature=9), headers={"origin": ORIGIN}
        )
        other = await gateway.http.get("/live", headers={"origin": "https://evil.example"})

    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert (error.status_code, error.headers["access-control-allow-origin"]) == (400, ORIGIN)
    exposed = error.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "retry-after-ms", "x-should-retry"} <= set(exposed)
    assert "access-control-allow-origin" not in other.headers


async def test_an_unexpected_error_is_in_the_log_and_shows_the_client_nothing(
    broker: MemoryBroker, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with HaywireBus(broker) as bus, live_gateway(bus) as gateway:
        response = await gateway.chat()
        num_errors = await gateway.sample("warren_gateway_errors_total")

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert num_errors == 1
    (record,) = [record for record in caplog.records if record.message == "request failed"]
    assert record.__dict__["request_id"] == response.headers["x-request-id"]
    assert record.exc_info is not None


async def test_the_end_of_a_request_has_one_line_in_the_log_without_its_content(
    gateway: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    response = await gateway.chat()

    (record,) = [record for record in caplog.records if record.message == "request ended"]
    facts: dict[str, Any] = record.__dict__
    assert facts["request_id"] == response.headers["x-request-id"]
    assert (facts["model"], facts["status"], facts["attempt"]) == ("scripted", 200, 1)
    assert "code" not in facts
    assert facts["worker"].startswith("worker.")
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (3, 3)
    assert facts["duration_s"] > 0
    assert "three" not in caplog.text


async def test_a_request_is_a_span_whose_context_travels_in_the_job(
    gateway: LiveGateway, worker: ScriptedWorker, spans: InMemorySpanExporter
) -> None:
    response = await gateway.http.post(
        "/v1/chat/completions",
        json=chat_body(),
        headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"},
    )

    (span,) = _named(spans, "gateway.request")
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    own_id = f"{_context(span).span_id:016x}"
    assert worker.jobs[0].job.trace["traceparent"] == f"00-{TRACE_ID}-{own_id}-01"
    assert span.attributes is not None
    assert span.attributes["warren.request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/v1/chat/completions", json.dumps(chat_body(temperature=9))),
        ("POST", "/v1/chat/completions", json.dumps(chat_body(model="unknown"))),
        ("POST", "/v1/embeddings", "{"),
        ("GET", "/nowhere", ""),
        ("GET", "/v1/streams/none", ""),
    ],
)
async def test_the_line_of_every_refused_request_has_the_trace_of_its_span(
    gateway: LiveGateway,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    content: str,
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"content-type": "application/json"}
    parents = ("", "", f"00-{TRACE_ID}-{SPAN_ID}-01", "00-x-y-01")
    for parent in parents:
        with_parent = {**headers, "traceparent": parent} if parent else headers
        await gateway.http.request(method, path, content=content, headers=with_parent)

    ids = [line["trace_id"] for line in _refused(caplog)]
    assert ids == [f"{_context(span).trace_id:032x}" for span in _named(spans, "gateway.request")]
    assert (len(set(ids)), ids[2]) == (len(parents), TRACE_ID)


async def test_a_request_refused_before_its_key_is_checked_has_a_trace(
    bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    KeyFile(tmp_path / "keys").add("prometheus", scopes=("metrics",))
    async with live_gateway(bus, keys_file=tmp_path / "keys") as gateway:
        for path in ("/v1/models", "/metrics"):
            assert (await gateway.http.get(path)).status_code == 401
    async with live_gateway(bus) as gateway:
        await gateway.http.get("/v1/models", headers={"host": "evil.example"})

    assert len({int(line["trace_id"], 16) for line in _refused(caplog)}) == 3


async def test_a_span_says_what_became_of_its_request(
    broker: MemoryBroker, worker: ScriptedWorker, spans: InMemorySpanExporter
) -> None:
    async with HaywireBus(broker) as bus, live_gateway(bus) as gateway:
        failed = await gateway.chat()
        refused = await gateway.http.get("/nowhere")
        for path in ("/live/", "/health", "/metrics", "/admin/v1/status"):
            assert (await gateway.http.get(path)).status_code == 200

    of_failed, of_refused = _named(spans, "gateway.request")
    assert of_failed.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 500,
        "warren.request_id": failed.headers["x-request-id"],
        "model": "scripted",
    }
    assert of_refused.attributes is not None
    assert of_refused.attributes["warren.request_id"] == refused.headers["x-request-id"]
    assert [one.status.is_ok for one in (of_failed, of_refused)] == [False, True]


async def test_the_openapi_page_knows_the_parameters(gateway: LiveGateway) -> None:
    page = (await gateway.http.get("/openapi.json")).json()

    body = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(schema["properties"])


async def test_a_job_is_answered_by_its_own_reply_queue(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await gateway.chat()

    message = worker.jobs[0].message
    request_id = worker.jobs[0].job.request_id
    assert message.correlation_id == request_id
    assert message.reply_to == topology.reply_queue(request_id, 60).bindings[0].routing_key


def _refused(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines of refused requests."""
    return [vars(record) for record in caplog.records if record.message == "request refused"]


def _context(span: ReadableSpan) -> SpanContext:
    context: SpanContext | None = span.context
    assert context is not None
    return context


def _named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]
