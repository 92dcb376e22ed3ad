"""Forks of answers, with a worker whose tokens depend on all tokens before them."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc.jwk import OKPKey

from bench.echo_worker import MODEL
from gateway.intake.receipts import verified
from shared.bus.memory import MemoryBroker
from shared.messages import Receipt
from tests.support.gateway.http import LiveGateway, events, hears_a_worker, live_gateway
from tests.support.workers.synthetic import echo_worker

BODY: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 24,
    "seed": 5,
    "ignore_eos": True,
    "receipt": True,
}
NUM_TOKENS = 24


@pytest.fixture
async def gateway(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[LiveGateway]:
    keys = tmp_path / "receipts.pem"
    keys.write_bytes(OKPKey.generate_key("Ed25519").as_pem(private=True))
    async with (
        echo_worker(broker),
        live_gateway(broker, receipt_keys_file=keys, disconnect_grace_s=5) as gateway,
    ):
        await hears_a_worker(gateway)
        yield gateway


async def asked(
    gateway: LiveGateway, path: str = "/v1/chat/completions", **more: Any
) -> httpx.Response:
    """A request whose log is kept."""
    return await gateway.http.post(path, json={**BODY, "stream": True, "detach": True, **more})


async def fork(gateway: LiveGateway, stream_id: str, at: int, **more: Any) -> httpx.Response:
    return await asked(gateway, f"/v1/streams/{stream_id}/fork?at={at}", **more)


async def receipt_in(gateway: LiveGateway, response: httpx.Response) -> Receipt:
    assert response.status_code == 200, response.text
    sent = [event for event in events(response.text) if event != "[DONE]"]
    keys = (await gateway.http.get("/.well-known/jwks.json")).json()
    return verified(sent[-1]["receipt"], keys)


async def tokens(gateway: LiveGateway, response: httpx.Response) -> list[int]:
    """The tokens of the first choice."""
    return list((await receipt_in(gateway, response)).choices[0].token_ids)


def text_of(response: httpx.Response) -> str:
    chunks = [event for event in events(response.text) if event != "[DONE]"]
    return "".join(
        choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
    )


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


async def test_all_choices_of_a_fork_begin_with_its_tokens_and_find_them_in_the_cache(
    gateway: LiveGateway,
) -> None:
    first = await asked(gateway, max_tokens=80)

    other = await fork(gateway, first.headers["x-request-id"], 60, max_tokens=80, n=3, seed=6)

    receipt = await receipt_in(gateway, other)
    before = tuple((await tokens(gateway, first))[:60])
    answers = [choice.token_ids for choice in receipt.choices]
    assert [answer[:60] for answer in answers] == [before] * 3
    assert len(set(answers)) == 3
    assert receipt.num_given_tokens == 60
    assert receipt.usage.completion_tokens == 240


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


async def test_a_request_that_is_repeated_forks_once(gateway: LiveGateway) -> None:
    first = await asked(gateway)
    path = f"/v1/streams/{first.headers['x-request-id']}/fork?at=4"
    body = json.dumps({**BODY, "seed": 9})
    headers = {"content-type": "application/json", "idempotency-key": "fork"}

    one, two = [await gateway.http.post(path, content=body, headers=headers) for _ in range(2)]

    assert one.json()["id"] == two.json()["id"]
