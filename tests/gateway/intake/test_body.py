"""Bodies are bounded in the values that they describe before there are any."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.intake.admission import MAX_CONTAINERS, MAX_VALUES, count_values
from shared.bus.memory import MemoryBus
from shared.errors import InvalidRequest
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import LiveGateway, chat_body, live_gateway
from tests.support.network.attacks import Victim
from tests.support.workers.scripted_worker import ScriptedWorker, start_only

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LONG_TEXT = json.dumps(",[{" * (MAX_VALUES // 2) + '\\",[').encode()


def num_values_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_values_of, value.values()))
    return 1 + sum(map(num_values_of, value)) if isinstance(value, list) else 1


values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='"\\,[]{}aé\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\,[]{}a'), inner),
)


@given(values)
def test_no_value_is_missed(value: Any) -> None:
    assert count_values(json.dumps(value).encode()) >= num_values_of(value)


@given(values)
@settings(max_examples=20)
def test_text_is_not_counted_where_it_matters(value: Any) -> None:
    body = b"[%s,%s]" % (LONG_TEXT, json.dumps(value).encode())

    assert count_values(body) <= 3 + 2 * num_values_of(value)


@pytest.mark.parametrize(
    "items",
    [
        pytest.param(b"[]," * MAX_CONTAINERS, id="arrays"),
        pytest.param(b"{}," * MAX_CONTAINERS, id="objects"),
        pytest.param(b"[" * MAX_CONTAINERS, id="nested"),
        pytest.param(b"1," * MAX_VALUES, id="numbers"),
        pytest.param(b'"",' * MAX_VALUES, id="strings"),
        pytest.param(rb'"\"",' * MAX_VALUES, id="escapes"),
        pytest.param(rb'"\\",' * MAX_VALUES, id="backslashes"),
    ],
)
def test_too_many_values_are_refused(items: bytes) -> None:
    with pytest.raises(InvalidRequest):
        count_values(b'{"metadata":[' + items + b"0]}")


@pytest.mark.parametrize("name", ["metadata", "chat_template_kwargs", "tools", "unknown"])
async def test_values_are_refused_in_any_field(gateway: LiveGateway, name: str) -> None:
    many: dict[str, Any] = {name: [[]] * (MAX_CONTAINERS + 1)}

    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
        response = await gateway.post(path, **chat_body(), **many)

        assert response.status_code == 400
        assert "objects and arrays" in response.json()["error"]["message"]


async def test_a_long_text_is_not_refused(gateway: LiveGateway) -> None:
    text = "a, [b] {c} " * 50_000

    response = await gateway.post("/v1/completions", model="scripted", prompt=text)

    assert response.status_code == 200


async def test_bodies_in_flight_are_limited_together(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with live_gateway(bus, max_bytes_in_flight=100_000) as gateway, AsyncExitStack() as held:
        body = chat_body(stream=True, user="a" * 60_000)
        one = gateway.http.stream("POST", "/v1/chat/completions", json=body)
        await held.enter_async_context(one)

        response = await gateway.chat(user="a" * 60_000)

        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"


async def test_what_a_request_reads_counts_until_it_is_sent(bus: MemoryBus) -> None:
    item = {"type": "message", "role": "user", "content": "a" * 60_000}
    async with live_gateway(bus, max_bytes_in_flight=100_000) as gateway:
        made = await gateway.post("/v1/conversations", items=[item])
        path = f"/v1/conversations/{made.json()['id']}/items"
        small = [await gateway.http.get(path) for _ in range(2)]
        assert (await gateway.post(path, items=[item])).status_code == 200

        large = await gateway.http.get(path)

    assert [answer.status_code for answer in small] == [200, 200]
    assert large.status_code == 429
    assert large.json()["error"]["code"] == "rate_limit_exceeded"
    assert large.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("kind", ["conversation", "previous_response_id"])
async def test_what_a_request_continues_counts_twice(
    bus: MemoryBus, worker: ScriptedWorker, path: str, kind: str
) -> None:
    async def say(gateway: LiveGateway, path: str, length: int, **more: Any) -> httpx.Response:
        return await gateway.post(path, model="scripted", input="a" * length, **more)

    async with live_gateway(bus, max_bytes_in_flight=200_000) as gateway:
        made = await gateway.post("/v1/conversations")
        first = {"conversation": made.json()["id"]} if kind == "conversation" else {}
        answered = await say(gateway, "/v1/responses", 20_000, **first)
        before = first or {"previous_response_id": answered.json()["id"]}
        short = await say(gateway, path, 1, **before)
        answered = await say(gateway, "/v1/responses", 40_000, **before)
        before = first or {"previous_response_id": answered.json()["id"]}

        long = await say(gateway, path, 1, **before)

    assert (short.status_code, answered.status_code, long.status_code) == (200, 200, 429)


@pytest.mark.parametrize("kind", ["conversation", "previous_response_id"])
async def test_what_a_response_continued_counts_while_it_is_listed(
    bus: MemoryBus, worker: ScriptedWorker, kind: str
) -> None:
    async def say(gateway: LiveGateway, text: str, **before: str) -> str:
        answered = await gateway.post("/v1/responses", model="scripted", input=text, **before)
        return str(answered.raise_for_status().json()["id"])

    async with live_gateway(bus, max_bytes_in_flight=200_000) as gateway, AsyncExitStack() as held:
        made = await gateway.post("/v1/conversations")
        first = {"conversation": made.json()["id"]} if kind == "conversation" else {}
        first_id = await say(gateway, "a" * 40_000, **first)
        second_id = await say(gateway, "b", **(first or {"previous_response_id": first_id}))
        path = f"/v1/responses/{second_id}/input_items?limit=1"
        alone = await gateway.http.get(path)
        worker.script = start_only
        body = chat_body(stream=True, user="a" * 170_000)
        await held.enter_async_context(gateway.http.stream("POST", CHAT, json=body))

        beside_another = await gateway.http.get(path)

    assert (alone.status_code, beside_another.status_code) == (200, 429)


LONG_PROMPT = " ".join(["x" * 10_000] * 50)


def posted(path: str, **body: Any) -> tuple[str, bytes]:
    return path, json.dumps({"model": "scripted", **body}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(
            [
                posted(
                    "/v1/chat/completions",
                    messages=[{"role": "user", "content": LONG_PROMPT}],
                    n=128,
                    max_tokens=1,
                )
            ]
            * 4,
            id="128 answers",
        ),
        pytest.param(
            [
                posted(
                    "/v1/completions", prompt=LONG_PROMPT, n=128, max_tokens=1, echo=True, **more
                )
                for more in ({}, {"stream": True})
            ]
            * 4,
            id="128 echoes",
        ),
        pytest.param([posted("/tokenize", prompt="x" * (1 << 20))] * 8, id="tokenize"),
        pytest.param([posted("/tokenize", prompt="x " * (1 << 19))] * 8, id="tokenize words"),
        pytest.param([posted("/tokenize", prompt="語" * ((1 << 20) // 3))] * 8, id="tokenize CJK"),
    ],
)
async def test_long_texts_cost_little(victim: Victim, requests: list[tuple[str, bytes]]) -> None:
    async def attack(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=None, verify=NO_TLS) as client:
            answers = [client.post(path, content=body, headers=JSON) for path, body in requests]
            answered = await asyncio.gather(*answers)
            assert {answer.status_code for answer in answered} <= {200, 400, 429}

    await victim.assert_attack_costs_little(attack)


@pytest.mark.parametrize("item", [b"[],", b"1000,"])
async def test_large_bodies_cost_little(victim: Victim, item: bytes) -> None:
    items = item * ((4 << 20) // len(item) - 100)
    body = b'{"model":"scripted","messages":[],"chat_template_kwargs":{"a":[%s0]}}' % items

    async def attack(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=None, verify=NO_TLS) as client:
            paths = ("/v1/chat/completions", "/tokenize", "/v1/responses") * 4
            answers = [client.post(path, content=body, headers=JSON) for path in paths]
            assert {answer.status_code for answer in await asyncio.gather(*answers)} <= {400, 429}

    await victim.assert_attack_costs_little(attack)
