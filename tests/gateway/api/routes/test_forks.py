"""Forks of answers, with a worker whose tokens depend on all tokens before them."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.echo_worker import MODEL
from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBroker
from shared.messages import Receipt
from tests.support.engines.brake import Brake
from tests.support.gateway.http import LiveGateway, events, hears_a_worker, live_gateway
from tests.support.receipts import new_signing_key, receipt_of
from tests.support.workers.synthetic import doomed_worker, echo_worker

BODY: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 24,
    "seed": 5,
    "ignore_eos": True,
    "receipt": True,
}
NUM_TOKENS = 24
CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": "one two three four " * 20}]
LETTERS: Mapping[str, Any] = {
    "structured_outputs": {"regex": "[a-z ]{80}"},
    "ignore_eos": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Reykjavik"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def signing_key(tmp_path: Path) -> Path:
    return new_signing_key(tmp_path)


@pytest.fixture
async def gateway(broker: MemoryBroker, signing_key: Path) -> AsyncIterator[LiveGateway]:
    async with (
        echo_worker(broker),
        live_gateway(broker, receipt_keys_file=signing_key, disconnect_grace_s=5) as gateway,
    ):
        await hears_a_worker(gateway)
        yield gateway


@asynccontextmanager
async def gateway_alone(
    broker: MemoryBroker, signing_key: Path, **options: Any
) -> AsyncIterator[LiveGateway]:
    """A gateway whose workers a test starts; ``options`` are the gateway's."""
    options = {"receipt_keys_file": signing_key, "disconnect_grace_s": 60, **options}
    async with live_gateway(broker, **options) as gateway:
        yield gateway


async def asked(gateway: LiveGateway, path: str = CHAT, /, **more: Any) -> httpx.Response:
    """A request whose log is kept."""
    return await gateway.http.post(path, json={**BODY, "stream": True, "detach": True, **more})


async def fork(gateway: LiveGateway, stream_id: str, at: int, **more: Any) -> httpx.Response:
    return await asked(gateway, f"/v1/streams/{stream_id}/fork?at={at}", **more)


async def receipt_in(gateway: LiveGateway, response: httpx.Response) -> Receipt:
    assert response.status_code == 200, response.text
    return await receipt_in_stream(gateway, response.text)


async def receipt_in_stream(gateway: LiveGateway, body: str) -> Receipt:
    sent = [event for event in events(body) if event != "[DONE]"]
    return await receipt_of(gateway, sent[-1]["receipt"])


async def tokens(gateway: LiveGateway, response: httpx.Response) -> list[int]:
    """The tokens of the first choice."""
    return list((await receipt_in(gateway, response)).choices[0].token_ids)


def text_of(response: httpx.Response) -> str:
    return text_in(response.text)


def text_in(body: str) -> str:
    """The text of a stream, or of its beginning, up to the last complete event."""
    complete = body[: body.rfind("\n\n") + 2]
    return "".join(delta.get("content") or "" for delta in deltas_in(complete))


async def body_with_more_than(text: str, pieces: AsyncIterator[str]) -> str:
    """The beginning of a stream, up to a piece whose text goes beyond ``text``."""
    body = ""
    while len(text_in(body)) <= len(text):
        body += await anext(pieces)
    return body


def call_in(response: httpx.Response) -> tuple[str, Any]:
    """The function and the arguments of the only call."""
    parts = [call for delta in deltas_in(response.text) for call in delta.get("tool_calls") or ()]
    functions = [part["function"] for part in parts]
    assert {part["index"] for part in parts} == {0}
    name, arguments = (
        "".join(function.get(field) or "" for function in functions)
        for field in ("name", "arguments")
    )
    return name, json.loads(arguments)


def deltas_in(body: str) -> list[dict[str, Any]]:
    chunks = [event for event in events(body) if event != "[DONE]"]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("at", [0, 1, 11, NUM_TOKENS - 1, NUM_TOKENS])
async def test_a_fork_without_a_change_gives_the_same_answer(gateway: LiveGateway, at: int) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], at)

    assert text_of(other) == text_of(first)
    assert await tokens(gateway, other) == await tokens(gateway, first)
    assert other.headers["x-request-id"] != first.headers["x-request-id"]


async def test_a_fork_has_the_tokens_before_it_and_others_behind_it(gateway: LiveGateway) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], 10, seed=6)

    before, after = await tokens(gateway, first), await tokens(gateway, other)
    assert after[:10] == before[:10]
    assert after[10:] != before[10:]
    assert len(after) == NUM_TOKENS


async def test_a_fork_of_a_fork_goes_on_from_both(gateway: LiveGateway) -> None:
    first = await asked(gateway)
    second = await fork(gateway, first.headers["x-request-id"], 8, seed=6)

    third = await fork(gateway, second.headers["x-request-id"], 16, seed=7)

    one, two, three = [await tokens(gateway, answer) for answer in (first, second, third)]
    assert three[:8] == one[:8]
    assert three[:16] == two[:16]
    assert three[16:] != two[16:]


async def test_all_choices_of_a_fork_begin_with_its_tokens(gateway: LiveGateway) -> None:
    first = await asked(gateway, max_tokens=80)

    other = await fork(gateway, first.headers["x-request-id"], 60, max_tokens=80, n=3, seed=6)

    receipt = await receipt_in(gateway, other)
    before = tuple((await tokens(gateway, first))[:60])
    answers = [choice.token_ids for choice in receipt.choices]
    assert [answer[:60] for answer in answers] == [before] * 3
    assert len(set(answers)) == 3
    assert receipt.num_given_tokens == 60
    assert receipt.usage.completion_tokens == 240


async def test_a_fork_finds_the_prompt_in_the_cache_of_its_worker(gateway: LiveGateway) -> None:
    first = await asked(gateway, messages=LONG)

    other = await fork(gateway, first.headers["x-request-id"], 10, messages=LONG, seed=6)

    before, after = [(await receipt_in(gateway, one)).usage for one in (first, other)]
    assert before.cached_tokens == 0
    assert after.cached_tokens > after.prompt_tokens - 16


async def test_a_fork_has_its_own_temperature(gateway: LiveGateway) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], 10, temperature=0.25)

    receipt = await receipt_in(gateway, other)
    assert receipt.sampling.temperature == 0.25
    assert receipt.choices[0].token_ids[:10] == tuple((await tokens(gateway, first))[:10])


async def test_a_constraint_of_a_fork_holds_for_the_given_and_the_new_tokens(
    gateway: LiveGateway,
) -> None:
    first = await asked(gateway, **LETTERS)
    stream_id = first.headers["x-request-id"]
    given = text_of(await fork(gateway, stream_id, 5, max_tokens=5, **LETTERS))
    regex = f"{re.escape(given)}(lighthouse|harbour)"

    other = await fork(gateway, stream_id, 5, structured_outputs={"regex": regex})

    assert re.fullmatch(regex, text_of(other))
    receipt = await receipt_in(gateway, other)
    assert receipt.choices[0].finish_reason == "stop"
    assert receipt.choices[0].token_ids[:5] == tuple((await tokens(gateway, first))[:5])


async def test_a_constraint_that_the_given_tokens_break_is_refused(gateway: LiveGateway) -> None:
    first = await asked(gateway, **LETTERS)
    path = f"/v1/streams/{first.headers['x-request-id']}/fork?at=5"

    refused = await gateway.http.post(
        path, json={**BODY, "structured_outputs": {"regex": "[0-9]+"}}
    )

    assert refused.status_code == 400, refused.text


async def test_a_fork_in_the_middle_of_a_call_completes_it(gateway: LiveGateway) -> None:
    calling: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "ignore_eos": False,
    }
    first = await asked(gateway, **calling)

    other = await fork(gateway, first.headers["x-request-id"], 8, seed=6, **calling)

    name, arguments = call_in(other)
    assert name == "weather"
    assert arguments["city"] in ("Paris", "Rome", "Reykjavik")
    assert (await tokens(gateway, other))[:8] == (await tokens(gateway, first))[:8]


async def test_a_fork_may_have_other_messages(gateway: LiveGateway) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], 7, messages=LONG)

    before, after = [await receipt_in(gateway, one) for one in (first, other)]
    assert after.choices[0].token_ids[:7] == before.choices[0].token_ids[:7]
    assert after.choices[0].token_ids != before.choices[0].token_ids
    assert after.usage.prompt_tokens > before.usage.prompt_tokens


async def test_a_fork_that_is_not_streamed_has_the_whole_text(gateway: LiveGateway) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], 9, stream=False, detach=False)

    assert other.json()["choices"][0]["message"]["content"] == text_of(first)


async def test_a_shorter_limit_than_the_tokens_before_ends_the_fork_at_once(
    gateway: LiveGateway,
) -> None:
    first = await asked(gateway)

    other = await fork(gateway, first.headers["x-request-id"], 9, max_tokens=9)

    receipt = await receipt_in(gateway, other)
    assert receipt.choices[0].token_ids == tuple((await tokens(gateway, first))[:9])
    assert receipt.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("query", "more", "param"),
    [
        ("at=25", {}, "at"),
        ("at=3&choice=1", {}, "choice"),
        ("at=3", {"logprobs": True}, "logprobs"),
        ("at=3", {"messages": []}, "messages"),
        ("at=-1", {}, "at"),
        ("", {}, "at"),
    ],
)
async def test_a_fork_at_no_place_of_the_answer_is_refused(
    gateway: LiveGateway, query: str, more: dict[str, Any], param: str
) -> None:
    first = await asked(gateway)
    path = f"/v1/streams/{first.headers['x-request-id']}/fork?{query}"

    refused = await gateway.http.post(path, json={**BODY, **more})

    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("stream_id", "status"), [(f"chatcmpl-{'0' * 32}", 410), (f"resp_{'0' * 32}", 400)]
)
async def test_what_is_not_kept_or_no_answer_cannot_be_forked(
    gateway: LiveGateway, stream_id: str, status: int
) -> None:
    assert (await fork(gateway, stream_id, 3)).status_code == status


async def test_a_stream_that_runs_is_forked_where_it_is(
    broker: MemoryBroker, signing_key: Path
) -> None:
    brake = Brake()
    async with (
        echo_worker(broker, brake=brake),
        gateway_alone(broker, signing_key) as gateway,
    ):
        await hears_a_worker(gateway)
        running = {**BODY, "stream": True, "detach": True}
        async with gateway.http.stream("POST", CHAT, json=running) as response:
            stream_id = response.headers["x-request-id"]
            brake.allow(6)
            await body_with_more_than("", response.aiter_text())
            too_far = await fork(gateway, stream_id, 20, seed=6)
            forking = fork(gateway, stream_id, 1, seed=6)
            other = await brake.allow_until(forking)
        brake.release()
        first = await gateway.http.get(f"/v1/streams/{stream_id}")

        assert too_far.status_code == 400, too_far.text
        before, after = await tokens(gateway, first), await tokens(gateway, other)
        assert (len(before), len(after)) == (NUM_TOKENS, NUM_TOKENS)
        assert after[:1] == before[:1]
        assert after != before


async def test_another_worker_runs_a_fork(broker: MemoryBroker, signing_key: Path) -> None:
    async with gateway_alone(broker, signing_key) as gateway:
        async with echo_worker(broker):
            await hears_a_worker(gateway)
            first = await asked(gateway)
        async with echo_worker(broker):
            other = await fork(gateway, first.headers["x-request-id"], 10)

        before, after = [await receipt_in(gateway, one) for one in (first, other)]
        assert after.executions[0].worker != before.executions[0].worker
        assert after.choices == before.choices


async def test_a_fork_survives_the_death_of_its_worker(
    broker: MemoryBroker, signing_key: Path
) -> None:
    async with gateway_alone(broker, signing_key) as gateway:
        async with echo_worker(broker):
            await hears_a_worker(gateway)
            stream_id = (await asked(gateway)).headers["x-request-id"]
            expected = await tokens(gateway, await fork(gateway, stream_id, 10, seed=6))
            given = text_of(await fork(gateway, stream_id, 10, max_tokens=10))
        path, forked = f"/v1/streams/{stream_id}/fork?at=10", {**BODY, "seed": 6, "stream": True}
        async with AsyncExitStack() as life:
            await life.enter_async_context(doomed_worker(broker, brake=Brake(6)))
            async with gateway.http.stream("POST", path, json=forked) as response:
                pieces = response.aiter_text()
                body = await body_with_more_than(given, pieces)
                await life.aclose()
                async with echo_worker(broker):
                    body += "".join([piece async for piece in pieces])

        receipt = await receipt_in_stream(gateway, body)
        assert list(receipt.choices[0].token_ids) == expected
        assert [one.attempt for one in receipt.executions] == [1, 2]
        begun = [one.num_tokens_before[0] for one in receipt.executions]
        assert begun[0] == 0
        assert 10 < begun[1] < NUM_TOKENS


async def test_a_stream_of_another_tenant_is_not_found(
    broker: MemoryBroker, signing_key: Path, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    alice, mallory = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("a", "m"))
    async with (
        echo_worker(broker),
        gateway_alone(broker, signing_key, keys_file=keys.path) as gateway,
    ):
        await hears_a_worker(gateway, alice)
        kept = {**BODY, "detach": True}
        first = await gateway.http.post(CHAT, json=kept, headers=alice)
        path = f"/v1/streams/{first.json()['id']}/fork?at=3"

        answers = [
            await gateway.http.post(path, json=BODY, headers=key) for key in (mallory, alice)
        ]

    assert [answer.status_code for answer in answers] == [404, 200]
    assert answers[0].json()["error"]["code"] == "stream_not_found"


async def test_a_request_that_is_repeated_forks_once(gateway: LiveGateway) -> None:
    first = await asked(gateway)
    path = f"/v1/streams/{first.headers['x-request-id']}/fork?at=4"
    body = json.dumps({**BODY, "seed": 9})
    headers = {"content-type": "application/json", "idempotency-key": "fork"}

    one, two = [await gateway.http.post(path, content=body, headers=headers) for _ in range(2)]

    assert one.json()["id"] == two.json()["id"]
