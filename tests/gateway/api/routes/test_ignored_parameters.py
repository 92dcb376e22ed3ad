"""The header that names the parameters of a body that are ignored, because they are unknown."""

from typing import Any

import pytest

from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

HEADER = "x-warren-ignored-parameters"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "one"}]}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "one"}),
    ("/v1/responses", {"input": "one"}),
    ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ("/v1/embeddings", {"input": "one"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_unknown_parameters_are_named(
    gateway: LiveGateway, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    slip = await gateway.post(path, model=MODEL, **body, max_token=5, tempreature=0, unset=None)
    right = await gateway.post(path, model=MODEL, **body)

    assert (slip.status_code, right.status_code) == (200, 200)
    assert slip.headers[HEADER] == "max_token, tempreature"
    assert HEADER not in right.headers


async def test_known_and_neutral_parameters_are_not_named(gateway: LiveGateway) -> None:
    response = await gateway.chat(user="u", priority=0, min_p=0.1, service_tier="auto")

    assert response.status_code == 200
    assert HEADER not in response.headers


async def test_an_error_names_them_too(gateway: LiveGateway) -> None:
    response = await gateway.chat(model="nosuch", max_token=5)

    assert (response.status_code, response.headers[HEADER]) == (404, "max_token")


async def test_their_names_are_fit_for_a_header(gateway: LiveGateway) -> None:
    names = ["a\r\nb: c", "é" * 100, *(f"name{k}" for k in range(10_000))]

    response = await gateway.chat(**dict.fromkeys(names, 1))

    named = response.headers[HEADER].split(", ")
    assert named[:2] == ["_" * 64, "a__b__c"]
    assert len(named) == 16


async def test_pages_of_other_sites_may_read_them(bus: MemoryBus, worker: ScriptedWorker) -> None:
    site = "https://chat.example"
    async with live_gateway(bus, cors_origins=site) as gateway:
        headers = {"origin": site}
        body = {**CHAT, "model": MODEL, "max_token": 5}
        response = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)

    assert HEADER in response.headers["access-control-expose-headers"].split(", ")
    assert response.headers[HEADER] == "max_token"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "one"}),
        ("/v1/score", {"text_1": "one", "text_2": "two"}),
        ("/v1/rerank", {"query": "one", "documents": ["two"]}),
        ("/tokenize", {"prompt": "one"}),
    ],
)
async def test_what_would_change_an_answer_is_refused(
    gateway: LiveGateway, path: str, body: dict[str, Any]
) -> None:
    refused = await gateway.post(path, model=MODEL, **body, truncate_prompt_tokens=1)
    neutral = await gateway.post(path, model=MODEL, **body, add_special_tokens=True, priority=0)

    assert (refused.status_code, neutral.status_code) == (400, 200)
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
