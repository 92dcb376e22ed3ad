"""``cached_tokens`` in the usage: what the workers said of all choices together."""

import json

import msgspec

from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

BODY = {"model": "scripted", "prompt": ["x", "y"]}

DETAILS = {"cached_tokens": 48, "cache_write_tokens": 0}


async def find_some(job: ScriptedJob) -> None:
    await job.start()
    for choice, num_cached_tokens in enumerate((16, 32)):
        finished = job.log.finish(choice, [1], "a", "stop")
        await job.publish(msgspec.structs.replace(finished, num_cached_tokens=num_cached_tokens))


async def test_a_whole_answer_sums_over_its_choices(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = find_some

    answer = (await gateway.post("/v1/completions", **BODY)).json()

    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 48,
        "cache_write_tokens": 0,
    }


async def test_so_does_a_stream(gateway: LiveGateway, worker: ScriptedWorker) -> None:
    worker.script = find_some
    options = {"include_usage": True}

    body = await gateway.post("/v1/completions", **BODY, stream=True, stream_options=options)

    *_, usage, _ = (line for line in body.text.splitlines() if line.startswith("data: "))
    chunk = json.loads(usage.removeprefix("data: "))
    assert chunk["usage"]["prompt_tokens_details"] == DETAILS
