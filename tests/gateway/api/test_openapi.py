"""The page at /docs: what it says is what the gateway does."""

from collections.abc import Iterator
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
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import create_app
from shared import settings as gateway_settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.settings import GatewaySettings
from tests.support.serving import served

_EXAMPLES = 25


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def document() -> dict[str, Any]:
    loaded = gateway_settings.load(GatewaySettings, port=0)
    return create_app(loaded, MemoryBus(MemoryBroker())).openapi()


DOCUMENT = document()
BODIES = [
    path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})
]
OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if isinstance(found, Ok)
]


def test_every_endpoint_is_on_the_page() -> None:
    assert set(DOCUMENT["paths"]) == {
        "/detokenize",
        "/health",
        "/live",
        "/metrics",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/streams/{stream_id}",
    }


@pytest.mark.parametrize("path", BODIES)
def test_an_example_is_answered_as_the_page_says(path: str, url: str) -> None:
    post = DOCUMENT["paths"][path]["post"]
    example = post["requestBody"]["content"]["application/json"]["example"]

    response = httpx.post(f"{url}{path}", json={**example, "model": "scripted"})

    assert response.status_code == 200, response.text
    schema = post["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), schema)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_whatever_is_sent_is_answered_as_the_page_says(operation: Any, url: str) -> None:
    """With schemathesis: no fault of the server, no undocumented status, type or shape."""

    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        response = case.call(base_url=url)
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    send()
