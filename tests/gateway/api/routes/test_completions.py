"""POST /v1/completions."""

import pytest

from tests.support.gateway.http import LiveGateway, events
from tests.support.gateway.rendering import told_as
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker


async def test_a_prompt_is_continued(gateway: LiveGateway) -> None:
    answer = await gateway.openai.completions.create(model="scripted", prompt="one two")

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "one two"


async def test_a_continuation_is_streamed(gateway: LiveGateway) -> None:
    stream = await gateway.openai.completions.create(
        model="scripted", prompt="one two", stream=True
    )

    chunks = [chunk async for chunk in stream]

    assert [chunk.choices[0].text for chunk in chunks] == ["one ", "two", ""]
    # The client's types do not know that the reason is null until the end.
    reasons = [chunk.model_dump()["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, "stop"]


async def test_16_tokens_are_the_default(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    answer = await gateway.openai.completions.create(model="scripted", prompt="word " * 20)

    assert worker.jobs[0].job.sampling.max_tokens == 16
    assert answer.choices[0].finish_reason == "length"


async def test_token_ids_are_a_prompt(gateway: LiveGateway) -> None:
    answer = await gateway.openai.completions.create(model="scripted", prompt=[7, 8])

    assert answer.choices[0].text == "7 8"


@pytest.mark.parametrize("prompt", [["one two", "three"], [[1, 2], [3]]])
async def test_several_prompts_are_several_choices(
    gateway: LiveGateway, prompt: list[str] | list[list[int]]
) -> None:
    body = {"model": "scripted", "prompt": prompt}

    answer = (await gateway.post("/v1/completions", **body)).json()

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [len(choice["text"].split()) for choice in answer["choices"]] == [2, 1]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_choices_interleave_and_each_ends_once(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def alternate(job: ScriptedJob) -> None:
        await job.start()
        for choice in (1, 0, 1):
            await job.say(f"{choice}", choice)
        await job.finish("b", choice=1)
        await job.finish("a", choice=0, reason="length")

    worker.script = alternate

    response = await gateway.post(
        "/v1/completions", model="scripted", prompt=["x", "y"], stream=True
    )

    *chunks, done = events(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["index"], c["text"]) for c in choices if c["text"]] == [
        (1, "1"),
        (0, "0"),
        (1, "1"),
        (1, "b"),
        (0, "a"),
    ]
    ends = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
    assert ends == [(1, "stop"), (0, "length")]
    assert done == "[DONE]"


@pytest.mark.parametrize(("is_included", "tokens"), [(False, ["1"]), (True, ["1", "3"])])
async def test_the_logprobs_have_a_stop_string_only_if_the_text_has_it(
    gateway: LiveGateway, worker: ScriptedWorker, is_included: bool, tokens: list[str]
) -> None:
    async def stop(job: ScriptedJob) -> None:
        await job.start()
        told, text = (told_as("1"), told_as("3")), "13" if is_included else "1"
        await job.publish(
            job.log.finish(0, [1, 1], text, "stop", "3", num_chars=[1], logprobs=told)
        )

    worker.script = stop
    asked = {"stop": ["3"], "include_stop_str_in_output": is_included, "logprobs": 1}

    response = await gateway.post("/v1/completions", model="scripted", prompt="x", **asked)

    (choice,) = response.json()["choices"]
    assert choice["logprobs"]["tokens"] == tokens
