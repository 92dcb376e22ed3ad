"""Receipts at the end of answers, and at their own endpoints."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.intake.keys.key_file import KeyFile
from gateway.intake.receipts import hash_request, verified
from shared.bus.memory import MemoryBus
from shared.messages import hash_ids, hash_text
from tests.support.gateway.http import LiveGateway, chat_body, events, live_gateway
from tests.support.receipts import new_signing_key, receipt_of
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

USER = [{"role": "user", "content": "one two"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 10},
}
TEXT = "one two"
"""What the worker answers."""


@pytest.fixture
def signing_key(tmp_path: Path) -> Path:
    return new_signing_key(tmp_path)


@pytest.fixture
def gateway_options(signing_key: Path) -> Mapping[str, Any]:
    return {"receipt_keys_file": signing_key, "disconnect_grace_s": 5}


def body_for(path: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, **BODIES[path], "receipt": True, **more}).encode()


async def post(gateway: LiveGateway, path: str, body: bytes, **headers: str) -> Any:
    headers = {"content-type": "application/json", **headers}
    return await gateway.http.post(path, content=body, headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_ends_with_a_receipt(gateway: LiveGateway, path: str) -> None:
    body = body_for(path, seed=1 << 60, temperature=0.5)

    answer = (await post(gateway, path, body)).json()

    receipt = await receipt_of(gateway, answer["receipt"])
    assert receipt.id == answer["id"]
    assert receipt.request_sha256 == hash_request(body)
    assert (receipt.seed, receipt.sampling.seed) == (str(1 << 60), None)
    assert receipt.sampling.temperature == 0.5
    assert receipt.choices[0].text_sha256 == hash_text([TEXT])
    assert receipt.usage.completion_tokens == len(receipt.choices[0].token_ids) == 2
    assert [one.attempt for one in receipt.executions] == [1]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_ends_with_a_receipt(gateway: LiveGateway, path: str) -> None:
    response = await post(gateway, path, body_for(path, stream=True))

    sent = [event for event in events(response.text) if event != "[DONE]"]
    found = [
        part["receipt"]
        for event in sent
        for part in (event, event.get("response", {}))
        if "receipt" in part
    ]
    receipt = await receipt_of(gateway, *found)
    assert receipt.choices[0].text_sha256 == hash_text([TEXT])
    assert receipt.id == response.headers["x-request-id"]


async def test_a_log_that_is_kept_has_its_receipt(gateway: LiveGateway) -> None:
    path = "/v1/chat/completions"
    response = await post(gateway, path, body_for(path, stream=True, detach=True))
    stream_id = response.headers["x-request-id"]

    answers = [
        (await gateway.http.get(f"/v1/streams/{stream_id}/receipt")).json() for _ in range(2)
    ]

    assert [(one["object"], one["id"]) for one in answers] == [("receipt", stream_id)] * 2
    first, second = [await receipt_of(gateway, one["receipt"]) for one in answers]
    assert first.choices == second.choices
    assert first.choices[0].text_sha256 == hash_text([TEXT])


async def test_a_request_that_asked_for_none_has_no_receipt(gateway: LiveGateway) -> None:
    path = "/v1/chat/completions"
    body = body_for(path, stream=True, detach=True, receipt=False)
    response = await post(gateway, path, body)

    asked = await gateway.http.get(f"/v1/streams/{response.headers['x-request-id']}/receipt")

    assert "receipt" not in response.text
    assert asked.status_code == 400
    assert "did not ask" in asked.json()["error"]["message"]


async def test_a_retry_has_the_receipt_of_the_first_request(gateway: LiveGateway) -> None:
    path = "/v1/chat/completions"
    answers = [
        (await post(gateway, path, body_for(path), **{"idempotency-key": "k"})).json()
        for _ in range(2)
    ]

    first, second = [await receipt_of(gateway, one["receipt"]) for one in answers]
    assert (first.id, first.choices) == (second.id, second.choices)


async def test_without_a_key_to_sign_with_a_receipt_is_refused(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with live_gateway(bus) as gateway:
        refused = await gateway.chat(receipt=True)
        keys = await gateway.http.get("/.well-known/jwks.json")

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "receipt"
    assert keys.json() == {"keys": []}


async def test_all_answers_of_an_api_key_may_have_receipts(
    bus: MemoryBus, worker: ScriptedWorker, signing_key: Path, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    with_receipts, without = file.add("alice", receipts=True), file.add("alice")

    async with live_gateway(bus, receipt_keys_file=signing_key, keys_file=file.path) as gateway:
        answers = [
            (
                await gateway.http.post(
                    "/v1/chat/completions",
                    json=chat_body(),
                    headers={"authorization": f"Bearer {key}"},
                )
            ).json()
            for key in (with_receipts, without)
        ]
        keys = await gateway.http.get("/.well-known/jwks.json")  # without an API key

    assert verified(answers[0]["receipt"], keys.json()).id == answers[0]["id"]
    assert "receipt" not in answers[1]


def test_token_ids_are_hashed_as_words_of_32_bits() -> None:
    assert hash_ids([1, 49_151]) == hashlib.sha256(b"\1\0\0\0\xff\xbf\0\0").hexdigest()
