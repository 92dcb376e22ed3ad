"""The arguments of a function are an object, whichever API offers it."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.gateway.http import LiveGateway, chat_body

NO_OBJECTS = [{"type": "string"}, {"type": "array"}, {"type": None}, {"type": ["object", "null"]}]
MODEL = {"model": "scripted"}


@pytest.fixture
def parsers() -> Mapping[str, str]:
    return {"tool_parser": "hermes"}


def offers(schema: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Bodies by the path of their endpoint, and where they have the schema."""
    function = {"name": "f", "parameters": schema}
    return {
        "/v1/chat/completions": (
            chat_body(tools=[{"type": "function", "function": function}]),
            "tools[0].function.parameters",
        ),
        "/chat/completions": (
            chat_body(functions=[function]),
            "functions[0].parameters",
        ),
        "/v1/responses": (
            {**MODEL, "input": "Hi", "tools": [{"type": "function", **function}]},
            "tools[0].parameters",
        ),
        "/v1/messages": (
            chat_body(max_tokens=8, tools=[{"name": "f", "input_schema": schema}]),
            "tools[0].input_schema",
        ),
        "/tokenize": (
            chat_body(tools=[{"type": "function", "function": function}]),
            "tools[0].function.parameters",
        ),
    }


@pytest.mark.parametrize("schema", NO_OBJECTS, ids=str)
@pytest.mark.parametrize("path", offers({}))
async def test_parameters_that_are_no_object_are_refused(
    gateway: LiveGateway, path: str, schema: Mapping[str, Any]
) -> None:
    body, param = offers(schema)[path]

    answer = await gateway.http.post(path, json=body)

    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "schema must be a JSON Schema of 'type: \"object\"'" in message
    assert answer.json()["error"].get("param", param) == param


@pytest.mark.parametrize("path", offers({}))
async def test_other_parameters_are_accepted(gateway: LiveGateway, path: str) -> None:
    for schema in ({}, {"type": "object"}, {"properties": {"a": {"type": "string"}}}):
        body, _ = offers(schema)[path]

        assert (await gateway.http.post(path, json=body)).status_code == 200
