"""The OpenAPI document: what it says is what the gateway does."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import create_app
from shared import settings as gateway_settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.settings import GatewaySettings
from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.serving import served

_EXAMPLES = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # Operators end the work of keys and tenants, of which there are none: nobody has to hear of it.
    with served(webhook_networks="127.0.0.0/8", settled_s=0.0) as url:
        yield url


@cache
def document() -> dict[str, Any]:
    """Made when a test asks for it: all processes collect the tests, and only one runs them."""
    loaded = gateway_settings.load(GatewaySettings, port=0)
    return create_app(loaded, MemoryBus(MemoryBroker())).openapi()


OF_KEYS = ("/admin/v1/keys", "/admin/v1/tenants")
"""The tests of these endpoints have a gateway that requires keys."""


def operations() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_endpoint_is_in_the_document() -> None:
    assert set(document()["paths"]) == {
        "/admin/v1/batches",
        "/admin/v1/batches/{batch_id}/cancel",
        "/admin/v1/dead-letters",
        "/admin/v1/dead-letters/{letter_id}",
        "/admin/v1/dead-letters/{letter_id}/retry",
        "/admin/v1/keys",
        "/admin/v1/keys/{key_id}",
        "/admin/v1/keys/{key_id}/rotate",
        "/admin/v1/keys/{key_id}/stop-work",
        "/admin/v1/models",
        "/admin/v1/models/{model}",
        "/admin/v1/history",
        "/admin/v1/replays",
        "/admin/v1/sessions",
        "/admin/v1/sessions/{person}",
        "/admin/v1/status",
        "/admin/v1/streams",
        "/admin/v1/streams/{stream_id}",
        "/admin/v1/tenants",
        "/admin/v1/tenants/{tenant}",
        "/admin/v1/usage",
        "/admin/v1/webhooks",
        "/admin/v1/webhooks/dead",
        "/admin/v1/webhooks/dead/{delivery_id}/retry",
        "/admin/v1/webhooks/{webhook_id}",
        "/admin/v1/webhooks/{webhook_id}/rotate_secret",
        "/admin/v1/webhooks/{webhook_id}/test",
        "/admin/v1/workers/{worker_id}/drain",
        "/.well-known/jwks.json",
        "/detokenize",
        "/health",
        "/live",
        "/metrics",
        "/tokenize",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/v1/embeddings",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/replays",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/score",
        "/v1/streams/{stream_id}",
        "/v1/streams/{stream_id}/fork",
        "/v1/streams/{stream_id}/receipt",
        "/v1/uploads",
        "/v1/uploads/{upload_id}/cancel",
        "/v1/uploads/{upload_id}/complete",
        "/v1/uploads/{upload_id}/parts",
        "/v1/usage",
    }


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(document()).validate()


def test_every_operation_but_probes_and_published_keys_takes_an_api_key() -> None:
    schemes = document()["components"]["securitySchemes"]
    taken = {name: [*operation.get("security", ())] for name, operation in operations()}

    assert [
        (scheme["type"], scheme.get("scheme", scheme.get("name"))) for scheme in schemes.values()
    ] == [
        ("http", "bearer"),
        ("apiKey", "x-api-key"),
    ]
    assert {name for name, security in taken.items() if not security} == {
        "GET /.well-known/jwks.json",
        "GET /live",
        "GET /metrics",
    }
    assert {name for name, security in taken.items() if {} in security} == {
        "GET /health",
        "DELETE /v1/streams/{stream_id}",
        "GET /v1/streams/{stream_id}",
        "GET /v1/streams/{stream_id}/receipt",
    }


def test_every_parameter_and_every_header_is_described() -> None:
    described = dict(document()["components"]["headers"])
    described |= {
        f"{name} {parameter['name']}": parameter
        for name, operation in operations()
        for parameter in operation.get("parameters", ())
    }

    assert {name.split()[-1] for name in described} >= {
        "Idempotency-Key",
        "Retry-After",
        "last-event-id",
        "traceparent",
        "x-request-id",
        "x-should-retry",
        "x-stream-token",
    }
    assert [name for name, item in described.items() if not item.get("description")] == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_parameter_that_is_refused_is_not_offered(path: str) -> None:
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    offered = body["schema"]["properties"]

    assert {"stop_sequences", "stream"} <= offered.keys()
    assert not {"stop", "stream_options", "n", "logprobs"} & offered.keys()


def test_every_response_has_the_headers_of_its_status() -> None:
    responses = [
        (status, response["headers"])
        for _, operation in operations()
        for status, response in operation["responses"].items()
    ]

    assert all("x-request-id" in headers for _, headers in responses)
    for status, header in (("401", "WWW-Authenticate"), ("429", "Retry-After")):
        assert all(header in headers for code, headers in responses if code == status)


def test_examples_are_answered_as_documented(url: str, subtests: pytest.Subtests) -> None:
    paths = [
        path
        for path, methods in document()["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
        and not path.startswith(OF_KEYS)
    ]

    for path in paths:
        with subtests.test(path):
            assert_example_is_answered(path, url)


def assert_example_is_answered(path: str, url: str) -> None:
    post = document()["paths"][path]["post"]
    example = post["requestBody"]["content"]["application/json"]["example"]

    changes: dict[str, Any] = {"model": "scripted"}
    with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=NO_TLS) as client:
        if path == "/v1/batches":
            files = {"file": ("in.jsonl", b"")}
            uploaded = client.post("/v1/files", data={"purpose": "batch"}, files=files)
            changes = {"input_file_id": uploaded.json()["id"]}
        if "{upload_id}" in path:
            empty = {"bytes": 0, "filename": "f", "mime_type": "m", "purpose": "batch"}
            created = client.post("/v1/uploads", json=empty)
            path = path.format(upload_id=created.json()["id"])
            changes = {"part_ids": []}
        if "{webhook_id}" in path:
            webhook = client.post("/admin/v1/webhooks", json={"url": f"{url}/live"})
            path = path.format(webhook_id=webhook.json()["id"])
        if "{conversation_id}" in path:
            conversation = client.post("/v1/conversations", json={}).json()
            path = path.format(conversation_id=conversation["id"])
        if "{stream_id}" in path:
            streamed = client.post(
                "/v1/chat/completions", json={**example, **changes, "stream": True, "detach": True}
            )
            first = json.loads(streamed.text.split("data: ")[1].splitlines()[0])
            path = f"{path.format(stream_id=first['id'])}?at=0"
        response = client.post(path, json={**example, **changes})

    assert response.status_code == 200, response.text
    schema = post["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), schema)


def test_whatever_is_sent_is_answered_as_documented(url: str, subtests: pytest.Subtests) -> None:
    """With schemathesis: no server error, no undocumented status, type, header or shape."""
    described = schemathesis.openapi.from_dict(document()).get_all_operations()
    offered = [found.ok() for found in described if isinstance(found, Ok)]

    assert len(offered) == len(operations())
    for operation in offered:
        with subtests.test(operation.label):
            assert_answers_are_documented(operation, url)


def assert_answers_are_documented(operation: Any, url: str) -> None:
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        response = case.call(base_url=url, timeout=PATIENCE_S)
        checks = [status_code_conformance, content_type_conformance, response_headers_conformance]
        if "text/event-stream" not in str(response.headers.get("content-type")):
            # Its schema is that of the whole text, which schemathesis compares with each event.
            checks.append(response_schema_conformance)
        # The deadline of a timeout of almost nothing has passed.
        is_late = response.status_code == 504 and "deadline_exceeded" in response.text
        case.validate_response(
            response, checks=checks if is_late else [not_a_server_error, *checks]
        )

    send()
