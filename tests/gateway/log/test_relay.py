"""The log's rules at work: lost connections, second workers, silence, other gateways."""

import asyncio
import gc

import pytest

from gateway.log import registry, stalls
from gateway.log.relay import LogRelay
from shared import topology
from shared.bus.base import Binding, Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import PublishRefused
from shared.log import LogWriter
from shared.messages import (
    Cancel,
    Continue,
    Progress,
    Release,
    Replaced,
    Started,
    decode_command,
    encode,
)
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    events,
    eventually,
    live_gateway,
    text_of,
)
from tests.support.workers.scripted_worker import Script, ScriptedJob, ScriptedWorker

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_connection_loses_and_repeats_nothing(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus, stream: bool
) -> None:
    async def count_through_failures(job: ScriptedJob) -> None:
        await job.start()
        for number in range(30):
            if number % 7 == 3:
                bus.sever()
                await asyncio.sleep(0.005 * (number % 4))
            await job.say(f"{number} ")
            await asyncio.sleep(0.002)
        await job.finish("end")

    worker.script = count_through_failures
    expected = "".join(f"{number} " for number in range(30)) + "end"

    response = await gateway.chat(stream=stream)

    if stream:
        assert text_of(response.text) == expected
    else:
        assert response.json()["choices"][0]["message"]["content"] == expected
        assert response.json()["usage"]["completion_tokens"] == 31


async def test_after_a_lost_connection_the_log_is_not_left_behind(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    async def sever_once(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        bus.sever()
        await job.finish("two")

    worker.script = sever_once

    response = await gateway.chat(stream=True)

    async def is_gone() -> bool:
        name = topology.reply_queue(response.headers["x-request-id"], 60).name
        return await bus.inspect(name) is None

    await eventually(is_gone)


async def test_what_a_stream_has_read_is_freed_at_its_end(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def is_freed() -> bool:
        return not any(isinstance(thing, LogRelay) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        await gateway.chat(stream=True)

        await eventually(is_freed)
    finally:
        gc.enable()


def dying_once(worker_bus: MemoryBus) -> Script:
    """A worker that dies after two words, and takes the job again."""

    async def die_and_come_back(job: ScriptedJob) -> None:
        await job.start()
        if job.is_first:
            await job.say("one ")
            await job.say("two ")
            worker_bus.sever()
            await asyncio.Event().wait()
        await job.say("three ")
        await job.finish("four")

    return die_and_come_back


class RefusingBus(MemoryBus):
    """Its broker refuses the first command that stops a run."""

    num_refused = 0

    async def publish(self, binding: Binding, message: Message) -> None:
        if not self.num_refused and stops_a_run(binding, message):
            self.num_refused += 1
            raise PublishRefused("the broker refused a message")
        await super().publish(binding, message)


def stops_a_run(binding: Binding, message: Message) -> bool:
    is_command = binding.routing_key.startswith("worker.")
    return is_command and isinstance(decode_command(message.body), Cancel)


async def test_a_command_that_the_broker_refuses_ends_no_stream(
    broker: MemoryBroker, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    worker.script = dying_once(worker_bus)

    async with RefusingBus(broker) as bus, live_gateway(bus) as gateway:
        body = (await gateway.chat(stream=True)).text

    assert text_of(body) == "one two three four"
    assert bus.num_refused == 1


class StuckBus(MemoryBus):
    """Nobody confirms the commands that stop runs."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if stops_a_run(binding, message):
            await asyncio.Event().wait()
        await super().publish(binding, message)


async def test_a_takeover_does_not_wait_for_a_worker_that_is_gone(
    broker: MemoryBroker, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    worker.script = dying_once(worker_bus)

    async with StuckBus(broker) as bus, live_gateway(bus) as gateway:
        body = (await gateway.chat(stream=True)).text

    assert text_of(body) == "one two three four"


async def test_a_worker_that_takes_a_job_again_receives_the_position_to_continue_from(
    gateway: LiveGateway, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    worker.script = dying_once(worker_bus)

    body = (await gateway.chat(stream=True)).text

    assert text_of(body) == "one two three four"
    heir = worker.jobs[1]
    assert [command for command in worker.commands if isinstance(command, Continue)] == [
        Continue(
            request_id=heir.job.request_id,
            ticket=heir.ticket,
            attempt=2,
            choices=(Progress(token_ids=(4, 4)),),
            replaced=Replaced(
                worker=worker.address, ticket=worker.jobs[0].ticket, reason="worker lost"
            ),
        )
    ]


async def test_a_replaced_worker_is_cancelled_and_its_late_words_are_dropped(
    gateway: LiveGateway, worker: ScriptedWorker, broker: MemoryBroker
) -> None:
    async def stay_silent(_: ScriptedJob) -> None:
        await asyncio.Event().wait()

    worker.script = stay_silent
    asking = asyncio.create_task(gateway.chat(stream=True))
    await worker.wait_until(lambda: bool(worker.jobs))
    job = worker.jobs[0]
    async with MemoryBus(broker) as bus, ScriptedWorker(bus, stay_silent) as successor:
        zombie, heir = LogWriter(1, 1), LogWriter(2, 1)
        first = zombie.delta(0, [1], "one ")
        heir.delta(0, [1], "one ")
        for event in (
            Started(worker=worker.address, ticket="zombie", num_prompt_tokens=(1,)),
            first,
            Started(worker=successor.address, ticket="heir", num_prompt_tokens=(1,), num_returns=1),
            zombie.delta(0, [2], "LATE "),
            heir.delta(0, [3], "two "),
            zombie.finish(0, [], "", "stop"),
            heir.finish(0, [4], "three", "stop"),
        ):
            await job.publish(event)
        body = (await asking).text

        assert text_of(body) == "one two three"
        await successor.wait_until(lambda: bool(successor.commands))
        await worker.wait_until(lambda: bool(worker.commands))
        request_id = job.job.request_id
        assert worker.commands == [Cancel(request_id=request_id, ticket="zombie", is_replaced=True)]
        assert successor.commands == [
            Continue(
                request_id=request_id,
                ticket="heir",
                attempt=2,
                choices=(Progress(token_ids=(1,)),),
                replaced=Replaced(worker=worker.address, ticket="zombie", reason="worker lost"),
            )
        ]


async def test_headers_wait_for_a_worker_and_then_pings_fill_the_silence(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    has_pinged = asyncio.Event()

    async def wake_up_late(job: ScriptedJob) -> None:
        await has_pinged.wait()
        await job.start()
        await job.finish("late")

    worker.script = wake_up_late

    async with (
        live_gateway(bus, first_event_timeout_s=0.1, ping_interval_s=0.05) as gateway,
        gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        body = ""
        async for piece in response.aiter_text():
            body += piece
            if body.count(": ping\n\n") >= 2:
                has_pinged.set()

    assert response.status_code == 200
    assert body.startswith(": ping\n\n")
    assert text_of(body) == "late"


async def test_the_nearest_deadline_of_what_waits_is_exported(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    has_looked = asyncio.Event()

    async def wake_up_late(job: ScriptedJob) -> None:
        await has_looked.wait()
        await job.start()
        await job.finish("late")

    worker.script = wake_up_late

    async with live_gateway(bus, request_timeout_s=1000) as gateway:
        body = chat_body(timeout=100)
        asking = asyncio.create_task(gateway.http.post(CHAT, json=body))
        await worker.wait_until(lambda: bool(worker.jobs))
        of_both_classes = await gateway.sample("warren_gateway_deadline_slack_seconds")
        due_tokens = await gateway.sample("warren_gateway_due_tokens")
        has_looked.set()
        await asking
        due_tokens_after = await gateway.sample("warren_gateway_due_tokens")

    assert 1000 < of_both_classes <= 1100
    assert due_tokens > 0
    assert due_tokens_after == 0


async def test_a_failure_after_the_header_wait_is_an_error_event(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    has_begun = asyncio.Event()

    async def refuse_late(job: ScriptedJob) -> None:
        await has_begun.wait()
        job.log.attempt = 0
        await job.fail("context_length_exceeded", "Too long.")

    worker.script = refuse_late

    async with (
        live_gateway(bus, first_event_timeout_s=0.05) as gateway,
        gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        has_begun.set()
        body = (await response.aread()).decode()

    assert response.status_code == 200
    assert events(body)[-1]["error"]["code"] == "context_length_exceeded"


async def test_a_gateway_lets_go_of_a_stream_that_another_one_takes_over(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus
) -> None:
    async def speak_on(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        await asyncio.Event().wait()

    worker.script = speak_on
    body = ""
    async with gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        async for piece in response.aiter_text():
            if "one" in piece:
                request_id = worker.jobs[0].job.request_id
                release = Release(request_id=request_id)
                await bus.publish(topology.ALL_GATEWAYS, Message(encode(release)))
            body += piece

    assert events(body)[-1]["error"]["code"] == "taken_over"
    async with bus.consume(topology.reply_queue(request_id, 60).name, is_exclusive=True) as log:
        assert (await anext(log)).message.correlation_id == ""
    assert worker.commands == []


@pytest.mark.parametrize("user", ["publisher", ""])
async def test_only_gateways_take_streams_over(
    gateway: LiveGateway, worker: ScriptedWorker, broker: MemoryBroker, user: str
) -> None:
    async def be_claimed(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        async with MemoryBus(broker, user=user) as bus:
            for is_cancelled in (False, True):
                forged = Release(request_id=job.job.request_id, is_cancelled=is_cancelled)
                await bus.publish(topology.ALL_GATEWAYS, Message(encode(forged)))
        await asyncio.sleep(0.05)
        await job.finish("two")

    worker.script = be_claimed

    response = await gateway.chat(stream=True)

    assert text_of(response.text) == "onetwo"


@pytest.mark.parametrize(("num_times", "end"), [(1, "two"), (2, "taken_over")])
async def test_an_earlier_reader_gets_a_stream_only_if_it_still_asks(
    gateway: LiveGateway, worker: ScriptedWorker, bus: MemoryBus, num_times: int, end: str
) -> None:
    async def be_claimed(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one")
        late = Release(request_id=job.job.request_id, reader="earlier", claimed_at=1.0)
        for _ in range(num_times):
            await bus.publish(topology.ALL_GATEWAYS, Message(encode(late)))
        await asyncio.sleep(0.05)
        if end == "two":
            await job.finish("two")
        else:
            await asyncio.Event().wait()

    worker.script = be_claimed

    response = await gateway.chat(stream=True)

    last = events(response.text)[-1]
    assert end == (last["error"]["code"] if "error" in last else text_of(response.text)[-3:])


async def test_an_undecodable_event_ends_the_stream_with_an_error(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def stammer(job: ScriptedJob) -> None:
        await job.start()
        await worker.bus.publish(topology.reply_binding(job.message.reply_to), Message(b"\xc1"))
        await asyncio.Event().wait()

    worker.script = stammer

    response = await gateway.chat(stream=True)

    assert events(response.text)[-1]["error"]["code"] == "internal_error"


async def is_read(bus: Bus, log: str) -> bool:
    """Whether a log has a reader, which gets all that is written from then on."""
    state = await bus.inspect(log)
    return state is not None and state.num_consumers == 1


@pytest.fixture
def impatient_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are published again soon to whose recreated logs nobody writes."""
    monkeypatch.setattr(stalls, "_DESERTED_S", 0.05)
    monkeypatch.setattr(registry, "LOOK_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("impatient_watch")
async def test_a_log_that_is_lost_under_its_reader_is_begun_again(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def lose_the_log(job: ScriptedJob) -> None:
        await job.start()
        if not job.is_first:
            return await job.finish("two")
        await eventually(lambda: is_read(worker.bus, job.message.reply_to))
        await job.say("one ")
        return await worker.bus.delete_queue(job.message.reply_to)

    worker.script = lose_the_log

    response = await gateway.chat(stream=True)

    assert text_of(response.text) == "one two"


@pytest.mark.usefixtures("impatient_watch")
@pytest.mark.parametrize(
    ("stream", "num_words", "expected"),
    [
        (True, 0, (503, "service_unavailable")),
        (False, 0, (503, "service_unavailable")),
        (False, 2, (503, "service_unavailable")),
        (True, 2, (200, "internal_error")),
    ],
)
async def test_a_request_whose_log_is_lost_each_time_is_to_be_sent_again_if_nothing_was_sent(
    stream: bool,
    num_words: int,
    expected: tuple[int, str],
    gateway: LiveGateway,
    worker: ScriptedWorker,
    worker_bus: MemoryBus,
) -> None:
    async def lose_the_log(job: ScriptedJob) -> None:
        await eventually(lambda: is_read(worker_bus, job.message.reply_to))
        if num_words:
            await job.start()
        for _ in range(num_words):
            await job.say("word ")
        await worker_bus.delete_queue(job.message.reply_to)

    worker.script = lose_the_log

    response = await gateway.chat(stream=stream)

    error = events(response.text)[-1] if response.status_code == 200 else response.json()
    assert (response.status_code, error["error"]["code"]) == expected
    assert ("retry-after" in response.headers) == (response.status_code == 503)


async def test_a_stream_whose_log_is_deleted_before_it_goes_on_has_expired(
    gateway: LiveGateway, worker: ScriptedWorker, worker_bus: MemoryBus
) -> None:
    request_id = f"chatcmpl-{'0' * 32}"
    queue = topology.reply_queue(request_id, 60)
    await worker_bus.declare(queue)
    resuming = asyncio.create_task(gateway.http.get(f"/v1/streams/{request_id}"))

    await eventually(lambda: is_read(worker_bus, queue.name))
    await worker_bus.delete_queue(queue.name)
    response = await resuming

    assert (response.status_code, response.json()["error"]["code"]) == (410, "stream_expired")
