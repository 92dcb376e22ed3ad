"""Properties of the API on which clients depend and that no other module tests."""

from typing import Any

import pytest

from tests.support.gateway.http import LiveGateway, chat_body, events, hears_a_worker, text_of
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker


async def test_a_bad_query_has_the_shape_of_all_errors(gateway: LiveGateway) -> None:
    """FastAPI's own 422 list is rewritten."""
    path = f"/v1/responses/resp_{'0' * 32}"

    response = await gateway.http.get(path, params={"stream": True, "starting_after": "x"})

    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["param"] == "starting_after"


async def test_chunks_are_padded_if_this_is_asked_for(gateway: LiveGateway) -> None:
    padded, plain = [
        await gateway.chat(stream=True, stream_options={"include_obfuscation": is_wanted})
        for is_wanted in (True, False)
    ]

    *chunks, _ = events(padded.text)
    assert all("obfuscation" in chunk for chunk in chunks)
    assert "obfuscation" not in plain.text
    assert text_of(padded.text) == text_of(plain.text)


async def test_several_answers_each_have_their_index(gateway: LiveGateway) -> None:
    whole = (await gateway.chat(n=3)).json()
    *chunks, done = events((await gateway.chat(n=3, stream=True)).text)

    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == 3
    ended = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert (sorted(ended), done) == ([0, 1, 2], "[DONE]")


async def test_no_comments_come_unasked(gateway: LiveGateway) -> None:
    body = (await gateway.chat(stream=True)).text

    assert not [line for line in body.splitlines() if line.startswith(":")]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        {"guided_regex": "("},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"logit_bias": {"1000000": 1}},
    ],
)
async def test_what_would_fail_in_a_worker_reaches_no_queue(
    gateway: LiveGateway, worker: ScriptedWorker, body: dict[str, Any]
) -> None:
    await hears_a_worker(gateway)

    response = await gateway.chat(**body)

    assert response.status_code == 400
    assert not worker.jobs


async def test_a_constraint_reaches_the_worker(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await gateway.chat(response_format={"type": "json_object"})

    constraint = worker.jobs[0].job.sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.source) == ("json_schema", '{"type":"object"}')


async def test_a_prompt_is_echoed_and_scored(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    body = {"model": MODEL, "prompt": "one two", "echo": True, "max_tokens": 0, "logprobs": 1}

    answer = (await gateway.post("/v1/completions", **body)).json()

    job = worker.jobs[0].job
    assert (job.sampling.max_tokens, job.sampling.prompt_logprobs, job.wants_prompt_text) == (
        0,
        1,
        True,
    )
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_what_wrappers_send_for_what_they_do_not_use_is_nothing(
    gateway: LiveGateway,
) -> None:
    """Wrappers of SDKs send empty values for parameters that they do not use."""
    names = ["tools", "tool_choice", "logit_bias", "response_format", "stop", "n", "logprobs"]
    nothing: tuple[object, ...] = ({}, [], None)
    for unused in nothing:
        body = chat_body(**dict.fromkeys(names, unused))

        assert (await gateway.post("/v1/chat/completions", **body)).status_code == 200


async def test_a_request_may_bring_its_own_deadline(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await gateway.chat(timeout=5, detach=True)
    await gateway.chat(timeout=10_000)

    (short, long) = (running.job for running in worker.jobs)
    assert short.deadline == short.created_at + 5
    assert long.deadline == long.created_at + 600
    assert (short.is_detached, long.is_detached) == (True, False)
