"""What orchestrators and dashboards see: /live, /health, /metrics, and the end of a gateway."""

import asyncio
import re
import time
from pathlib import Path

import httpx
import pytest

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Binding, Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import PublishersBlocked, PublishRefused
from shared.messages import Announcement, encode
from tests.gateway.fleet.announcements import announcement
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    events,
    eventually,
    hears_a_worker,
    live_gateway,
)
from tests.support.workers.scripted_worker import (
    ScriptedJob,
    ScriptedWorker,
    start_only,
    wait_before_the_end,
)

CHAT = "/v1/chat/completions"


async def test_a_gateway_is_healthy_without_a_worker(bus: MemoryBus) -> None:
    async with live_gateway(bus) as gateway:
        health = await gateway.http.get("/health")

    assert health.status_code == 200
    assert health.json() == {
        "status": "ok",
        "requests": 0,
        "models": {},
        "stores": {
            "database": "ok",
            "files": "ok",
            "database_disk": "ok",
            "files_disk": "ok",
        },
        "problems": [],
    }


@pytest.mark.parametrize("path", ["/live", "/health", "/v1/models", "/v1/models/scripted"])
async def test_a_probe_without_a_body_is_answered_like_one_with_it(
    gateway: LiveGateway, worker: ScriptedWorker, path: str
) -> None:
    await hears_a_worker(gateway)

    probed = await gateway.http.head(path)

    assert (probed.status_code, probed.content) == (200, b"")


async def test_health_lists_models_and_their_live_workers(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def is_listed() -> bool:
        models = (await gateway.http.get("/health")).json()["models"]
        return [w["worker"] for w in models.get("scripted", ())] == [worker.address]

    await eventually(is_listed)


async def test_a_gateway_without_its_broker_is_alive_and_not_healthy(
    broker: MemoryBroker,
) -> None:
    never_opened = MemoryBus(broker)

    async with live_gateway(never_opened) as gateway:
        health = await gateway.http.get("/health")
        live = await gateway.http.get("/live")
        probed = await gateway.http.head("/health")

    assert (probed.status_code, probed.content) == (503, b"")
    assert (health.status_code, health.json()["status"]) == (503, "broker_unavailable")
    assert live.status_code == 200


async def test_a_gateway_whose_broker_takes_no_messages_is_not_healthy(
    broker: MemoryBroker, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with BlockedBus(broker) as blocked, live_gateway(blocked) as gateway:
        await hears_a_worker(gateway)
        health = await gateway.http.get("/health")
        answer = await gateway.chat()

    assert (health.status_code, health.json()["status"]) == (503, "broker_blocked")
    assert answer.status_code == 503
    assert "memory or disk space" in answer.json()["error"]["message"]


async def test_a_full_queue_is_a_problem_that_health_names(
    broker: MemoryBroker, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    async with FullBus(broker) as full, live_gateway(full) as gateway:
        await hears_a_worker(gateway)
        answer = await gateway.chat()
        health = await gateway.http.get("/health")

    assert answer.status_code == 429
    assert health.json()["problems"] == ["The queue of the model 'scripted' is full."]


async def test_a_worker_whose_clock_is_ahead_is_a_problem_that_health_names(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    ahead = announcement("fast", model="scripted", sent_at=time.time() + 3600)
    await bus.publish(topology.ANNOUNCEMENTS, Message(encode(ahead)))

    async def is_named() -> bool:
        return bool((await gateway.http.get("/health")).json()["problems"])

    await eventually(is_named)
    [problem] = (await gateway.http.get("/health")).json()["problems"]
    assert "clock" in problem
    assert 3500 < await gateway.sample("warren_fleet_clock_skew_seconds") < 3700


async def test_workers_are_heard_again_after_a_reconnect(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    bus.sever()
    await bus.wait_connected()
    announcement = Announcement(
        worker="worker.new",
        model="new",
        vocab_size=1,
        max_seq_len=128,
        fingerprint="f",
        max_num_seqs=1,
    )

    async def is_heard() -> bool:
        await bus.publish(topology.ANNOUNCEMENTS, Message(encode(announcement)))
        return (await gateway.http.get("/v1/models/new")).status_code == 200

    await eventually(is_heard)


async def test_an_undecodable_announcement_harms_nobody(
    gateway: LiveGateway, bus: MemoryBus
) -> None:
    await bus.publish(topology.ANNOUNCEMENTS, Message(b"\xc1"))
    await bus.publish(topology.ALL_GATEWAYS, Message(b"\xc1"))

    assert (await gateway.chat()).status_code == 200
    await hears_a_worker(gateway)


async def test_requests_and_tokens_are_counted(gateway: LiveGateway) -> None:
    await gateway.chat()
    await gateway.chat(stream=True, max_tokens=2)
    await gateway.chat(temperature=9)

    assert await gateway.sample("warren_gateway_prompt_tokens_total") == 6
    assert await gateway.sample("warren_gateway_completion_tokens_total") == 5
    assert await gateway.sample("warren_gateway_choices_finished_total") == 2
    assert await gateway.sample("warren_gateway_time_to_first_token_seconds_count") == 2
    assert await gateway.sample("warren_gateway_inter_token_latency_seconds_count") == 3
    assert await gateway.sample("warren_gateway_errors_total") == 1


async def test_requests_have_the_label_of_their_class(gateway: LiveGateway) -> None:
    await gateway.chat()
    await gateway.chat(service_tier="flex")
    await ended(gateway, await order(gateway, [chat("a")]))

    metrics = (await gateway.http.get("/metrics")).text
    labels = '{class="%s",model="scripted",outcome="completed",tenant="anonymous"}'
    for job_class, number in (("interactive", 1.0), ("batch", 2.0)):
        assert f"warren_gateway_requests_total{labels % job_class} {number}\n" in metrics
        of_class = f'{{class="{job_class}",model="scripted"}}'
        assert f"warren_gateway_time_to_first_token_seconds_count{of_class} {number}\n" in metrics


async def test_waiting_requests_become_running_ones(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    may_start = asyncio.Event()

    async def start_when_told(job: ScriptedJob) -> None:
        await may_start.wait()
        await job.start()
        await asyncio.Event().wait()

    async def states() -> tuple[float, float]:
        waiting = await gateway.sample("warren_gateway_requests_waiting")
        return waiting, await gateway.sample("warren_gateway_requests_running")

    async def is_running() -> bool:
        return await states() == (0, 1)

    worker.script = start_when_told
    asking = asyncio.create_task(gateway.chat())
    await worker.wait_until(lambda: bool(worker.jobs))

    assert await states() == (1, 0)
    may_start.set()
    await eventually(is_running)
    asking.cancel()


async def test_a_draining_gateway_finishes_its_streams_and_takes_no_more(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker, last="the end")
    async with (
        live_gateway(bus, drain_grace_s=600) as gateway,
        gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as stream,
    ):

        async def is_draining() -> bool:
            return (await gateway.http.get("/health")).status_code == 503

        gateway.server.stop()
        await eventually(is_draining)
        health, refused = await gateway.http.get("/health"), await gateway.chat()
        may_end.set()
        body = "".join([piece async for piece in stream.aiter_text()])

    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert refused.headers["retry-after"]
    assert events(body)[-1] == "[DONE]"


async def test_a_stream_that_outlasts_the_grace_ends_with_an_error_that_says_where_it_continues(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with (
        live_gateway(bus, drain_grace_s=0.1) as gateway,
        gateway.http.stream("POST", CHAT, json=chat_body(stream=True)) as stream,
    ):
        gateway.server.stop()
        body = "".join([piece async for piece in stream.aiter_text()])

    request_id = stream.headers["x-request-id"]
    error = events(body)[-1]["error"]
    assert error["code"] == "service_unavailable"
    assert f"/v1/streams/{request_id}" in error["message"]
    assert "\nretry: 1000\n" in body
    log = await bus.inspect(topology.reply_queue(request_id, 60).name)
    assert log is not None
    assert log.num_consumers == 0
    assert worker.commands == []


async def test_an_answer_that_outlasts_the_grace_is_an_error_to_try_again(
    bus: MemoryBus, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    async with live_gateway(bus, drain_grace_s=0.1) as gateway:
        asking = asyncio.create_task(gateway.chat())

        async def is_running() -> bool:
            return await gateway.sample("warren_gateway_requests_running") == 1

        await eventually(is_running)
        gateway.server.stop()
        response = await asking

    assert response.status_code == 503
    assert response.headers["retry-after"]
    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_an_answer_does_not_wait_for_the_clients_acknowledgement(
    gateway: LiveGateway,
) -> None:
    """Without TCP_NODELAY this process would idle for 40 ms of each request. On a busy machine it
    may wait for the processor during most of the requests."""

    async def idle_s() -> float:
        begin = time.perf_counter() - time.process_time()
        await gateway.chat()
        return time.perf_counter() - time.process_time() - begin

    while await idle_s() >= 0.03:
        pass


async def test_a_gateway_that_was_stopped_answers_no_more(bus: MemoryBus) -> None:
    async with live_gateway(bus) as gateway:
        url = gateway.url

    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/live")


async def test_a_model_that_nobody_serves_takes_no_place_among_the_metrics(
    gateway: LiveGateway,
) -> None:
    response = await gateway.chat(model="made-up-name")

    assert response.status_code == 404
    assert "made-up-name" not in (await gateway.http.get("/metrics")).text


class BlockedBus(MemoryBus):
    """Its broker is short of memory."""

    is_blocked = True

    async def publish(self, binding: Binding, message: Message) -> None:
        raise PublishersBlocked("the broker has blocked publishers")


class FullBus(MemoryBus):
    """Its broker's queues of jobs are full."""

    async def publish(self, binding: Binding, message: Message) -> None:
        if binding.exchange == topology.JOBS:
            raise PublishRefused("the broker refused a message")
        await super().publish(binding, message)


class OddBus(MemoryBus):
    """Raises once what no bus should, where a log is declared."""

    num_logs = 0

    async def declare(self, *resources: Exchange | Queue) -> None:
        if resources[0].name.startswith("reply.chatcmpl-"):
            self.num_logs += 1
            if self.num_logs == 2:
                raise RuntimeError("odd")
        await super().declare(*resources)


async def test_what_runs_beside_the_requests_survives_a_bug(
    broker: MemoryBroker, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with OddBus(broker) as bus, live_gateway(bus) as gateway:

        async def has_more_than(num_logs: int) -> bool:
            return bus.num_logs > num_logs

        await gateway.chat()
        await eventually(lambda: has_more_than(1))  # a spare one, and not the request's own
        await gateway.chat()
        await eventually(lambda: has_more_than(3))

    assert [record.message for record in caplog.records if record.exc_info] == [
        "background task restarted"
    ]


async def test_metrics_that_need_no_key_name_no_tenant(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    headers = {"Authorization": f"Bearer {file.add('alice')}"}

    async def labels(**options: int) -> set[str]:
        async with live_gateway(bus, keys_file=file.path, **options) as gateway:
            answer = await gateway.http.post(CHAT, json=chat_body(), headers=headers)
            assert answer.status_code == 200
            exported = (await gateway.http.get("/metrics")).text
            return set(re.findall(r'tenant="(\w+)"', exported))

    assert await labels() == {"other"}
    assert await labels(metrics_tenants=1) == {"alice"}
