"""Workers that stand still: their streams go to others."""

import asyncio

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Cancel
from tests.support.gateway.http import live_gateway, text_of
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

SILENCE_S = 1.2
"""More than a gateway can stand still without noticing that it was late itself."""


async def test_the_stream_of_a_worker_that_stopped_goes_on_in_another_one(
    bus: MemoryBus, worker: ScriptedWorker, broker: MemoryBroker
) -> None:
    has_stopped = asyncio.Event()

    async def stop_in_the_middle(job: ScriptedJob) -> None:
        if not has_stopped.is_set():
            await job.start()
            await job.say("one ")
        worker.is_silent = True
        has_stopped.set()
        await asyncio.Event().wait()

    async def go_on(job: ScriptedJob) -> None:
        await job.start()
        await job.finish("two")

    worker.script = stop_in_the_middle
    async with live_gateway(bus, worker_silence_s=SILENCE_S) as gateway:
        asking = asyncio.create_task(gateway.chat(stream=True))
        await has_stopped.wait()
        async with MemoryBus(broker) as other, ScriptedWorker(other, go_on) as successor:
            body = (await asking).text

            assert text_of(body) == "one two"
            (again,) = successor.jobs
            first = worker.jobs[0]
            assert again.job.publication > 0
            assert again.job.request_id == first.job.request_id
            assert again.message.message_id != first.message.message_id
            await worker.wait_until(lambda: bool(worker.commands))
            assert worker.commands == [
                Cancel(request_id=first.job.request_id, ticket=first.ticket, is_replaced=True)
            ]


async def test_a_worker_that_thinks_long_but_is_there_keeps_its_stream(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async def think(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await asyncio.sleep(2 * SILENCE_S)
        await job.finish("two")

    worker.script = think
    async with live_gateway(bus, worker_silence_s=SILENCE_S) as gateway:
        assert text_of((await gateway.chat(stream=True)).text) == "one two"

    assert len(worker.jobs) == 1


async def test_a_job_that_waits_for_its_first_worker_is_not_published_twice(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async def wait(job: ScriptedJob) -> None:
        worker.is_silent = True
        await asyncio.sleep(2 * SILENCE_S)
        await job.start()
        await job.finish("late")

    worker.script = wait
    async with live_gateway(bus, worker_silence_s=SILENCE_S) as gateway:
        assert text_of((await gateway.chat(stream=True)).text) == "late"

    assert len(worker.jobs) == 1
