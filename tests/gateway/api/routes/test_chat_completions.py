"""POST /v1/chat/completions, through the official client and as bytes."""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from tests.support.gateway.http import LiveGateway, chat_body, events
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "one two three"}]


async def stream_of(gateway: LiveGateway, **more: Any) -> list[Any]:
    response = await gateway.chat(stream=True, **more)
    assert response.status_code == 200, response.text
    return events(response.text)


async def test_an_answer_comes_whole(gateway: LiveGateway) -> None:
    answer = await gateway.openai.chat.completions.create(model="scripted", messages=MESSAGES)

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


async def test_an_answer_is_streamed(gateway: LiveGateway) -> None:
    stream = await gateway.openai.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True
    )

    chunks = [chunk async for chunk in stream]

    assert [chunk.choices[0].delta.content or "" for chunk in chunks] == [
        "",
        "one ",
        "two ",
        "three",
        "",
    ]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


async def test_the_role_comes_first_and_once(gateway: LiveGateway) -> None:
    *chunks, _ = await stream_of(gateway)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])


async def test_the_reason_is_null_until_the_last_chunk_which_is_empty(gateway: LiveGateway) -> None:
    *chunks, _ = await stream_of(gateway)

    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}


async def test_a_stream_ends_with_done(gateway: LiveGateway) -> None:
    assert (await stream_of(gateway))[-1] == "[DONE]"


async def test_usage_is_not_streamed_unasked(gateway: LiveGateway) -> None:
    *chunks, _ = await stream_of(gateway)

    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_usage_that_was_asked_for_is_one_last_chunk(gateway: LiveGateway) -> None:
    *chunks, usage, _ = await stream_of(gateway, stream_options={"include_usage": True})

    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 0},
    }


async def test_usage_is_the_same_streamed_and_whole(gateway: LiveGateway) -> None:
    *_, usage, _ = await stream_of(gateway, stream_options={"include_usage": True})

    assert (await gateway.chat()).json()["usage"] == usage["usage"]


async def test_ids_count_what_was_sent(gateway: LiveGateway) -> None:
    gateway.http.headers["accept"] = "text/event-stream"
    body = (await gateway.chat(stream=True)).text

    ids = [frame.split("\n")[0] for frame in body.split("\n\n") if frame.startswith("id: ")]
    assert ids == ["id: ~1", "id: 1.4", "id: 2.8", "id: 3.13", "id: 3.13e"]


async def test_frames_are_data_alone_for_who_does_not_ask_for_more(gateway: LiveGateway) -> None:
    """``vllm bench serve`` takes a frame without ``data: `` for JSON."""
    body = (await gateway.chat(stream=True)).text

    *frames, end = body.split("\n\n")
    assert end == ""
    assert len(frames) > 3
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)


async def test_tokens_without_text_are_counted_and_not_shown(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def half_a_character(job: ScriptedJob) -> None:
        await job.start()
        await job.say("")
        await job.finish("é")

    worker.script = half_a_character

    *chunks, usage, _ = await stream_of(gateway, stream_options={"include_usage": True})

    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "é", None]
    assert usage["usage"]["completion_tokens"] == 2


async def test_the_stop_string_that_was_found_is_sent_with_the_finish_reason(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def stop_at_a_string(job: ScriptedJob) -> None:
        await job.start()
        await job.finish("one", stop_reason=" two")

    worker.script = stop_at_a_string

    choice = (await gateway.chat(stop=" two")).json()["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " two")


async def test_parameters_reach_the_worker(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    await gateway.chat(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, seed=-3, stop=["a"], ignore_eos=True
    )

    sampling = worker.jobs[0].job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (0, -3, ("a",))
    assert sampling.ignore_eos


async def test_a_job_has_a_deadline_and_the_id_of_its_answer(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    response = await gateway.chat()

    job = worker.jobs[0].job
    assert job.deadline == job.created_at + 600
    assert job.request_id == response.json()["id"] == response.headers["x-request-id"]
    assert job.request_id.startswith("chatcmpl-")


async def test_stream_headers_keep_proxies_from_buffering(gateway: LiveGateway) -> None:
    headers = (await gateway.chat(stream=True)).headers

    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"].startswith("chatcmpl-")


async def test_unknown_and_unused_fields_are_tolerated(gateway: LiveGateway) -> None:
    body = chat_body(store=True, metadata={}, tools=[], logit_bias={}, n=1, from_the_future=[1])

    response = await gateway.post("/v1/chat/completions", **body)

    assert response.status_code == 200
