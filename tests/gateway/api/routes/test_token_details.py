"""The details of the usage: the sums of what the workers said of the choices."""

import json

from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

BODY = {"model": "scripted", "prompt": ["x", "y"]}

OF_PROMPT = {"cached_tokens": 48, "cache_write_tokens": 0}
OF_COMPLETION = {"reasoning_tokens": 0, "accepted_prediction_tokens": 5}


async def find_some(job: ScriptedJob) -> None:
    await job.start()
    for choice, (num_cached, num_predicted) in enumerate([(16, 2), (32, 3)]):
        finished = job.log.finish(
            choice,
            [1] * 4,
            "a",
            "stop",
            num_cached_tokens=num_cached,
            num_predicted_tokens=num_predicted,
        )
        await job.publish(finished)


async def test_a_whole_answer_sums_over_its_choices(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = find_some

    usage = (await gateway.post("/v1/completions", **BODY)).json()["usage"]

    assert usage["prompt_tokens_details"] == OF_PROMPT
    assert usage["completion_tokens_details"] == OF_COMPLETION


async def test_so_does_a_stream(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    worker.script = find_some
    options = {"include_usage": True}

    body = await gateway.post("/v1/completions", **BODY, stream=True, stream_options=options)

    *_, last, _ = (line for line in body.text.splitlines() if line.startswith("data: "))
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"] == OF_PROMPT
    assert usage["completion_tokens_details"] == OF_COMPLETION
