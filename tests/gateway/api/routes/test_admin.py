"""What operators see and do, and who is an operator."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Drain
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    eventually,
    hears_a_worker,
    live_gateway,
)
from tests.support.workers.jobs import UNSERVED, dead_letter
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker, start_only

STATUS, LETTERS = "/admin/v1/status", "/admin/v1/dead-letters"


async def status_of(gateway: LiveGateway) -> Any:
    response = await gateway.http.get(STATUS)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
async def letters(bus: MemoryBus, gateway: LiveGateway) -> list[str]:
    """The ids of two dead letters."""
    ids = ["one", "two"]
    for request_id in ids:
        await dead_letter(bus, request_id)
    return ids


async def ids_of_letters(gateway: LiveGateway) -> list[str]:
    return [letter["id"] for letter in (await gateway.http.get(LETTERS)).json()["data"]]


async def test_the_status_says_which_engine_is_away(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.announcement = msgspec.structs.replace(
        worker.announcement, engine="vllm 0.32.0", is_engine_away=True
    )

    async def is_away() -> bool:
        workers = (await status_of(gateway))["workers"]
        return [(one["state"], one["engine"]) for one in workers] == [
            ("engine_away", "vllm 0.32.0")
        ]

    await eventually(is_away)


async def test_the_status_lists_workers_and_their_queues(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)

    async def are_queues_seen() -> bool:
        return bool((await status_of(gateway))["queues"])

    await eventually(are_queues_seen)
    status = await status_of(gateway)

    (seen,) = status["workers"]
    assert f"worker.{seen['id']}" == worker.address
    assert (seen["model"], seen["state"], seen["num_free"]) == (MODEL, "serving", 8)
    assert [(queue["lane"], queue["num_waiting"]) for queue in status["queues"]] == [
        (lane, 0) for lane in topology.LANES
    ]
    assert status["gateway"]["status"] == "ok"


async def test_a_stream_is_listed_with_its_worker_while_it_runs(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_two_words(job: ScriptedJob) -> None:
        await job.start()
        await job.say("a ")
        await job.say("b ")
        await start_only(job)

    worker.script = say_two_words
    body = chat_body(stream=True)
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        while "b " not in await anext(lines):
            pass
        (stream,) = (await status_of(gateway))["streams"]

    assert stream["id"] == response.headers["x-request-id"]
    assert (stream["state"], stream["num_tokens"], stream["num_crashes"]) == ("running", 2, 0)
    assert f"worker.{stream['worker']}" == worker.address


async def test_usage_is_counted_by_tenant(gateway: LiveGateway) -> None:
    await gateway.chat(max_tokens=2)
    await gateway.chat()

    (tenant,) = (await status_of(gateway))["tenants"]
    assert tenant == {
        "tenant": "",
        "num_requests": 2,
        "num_in_flight": 0,
        "num_interactive": 0,
        "num_failed": 0,
        "num_cancelled": 0,
        "num_prompt_tokens": 6,
        "num_cached_tokens": 0,
        "num_generated_tokens": 5,
    }


@pytest.mark.parametrize("immediate", [False, True])
async def test_a_drain_is_sent_to_its_worker(
    gateway: LiveGateway, worker: ScriptedWorker, *, immediate: bool
) -> None:
    await hears_a_worker(gateway)
    (seen,) = (await status_of(gateway))["workers"]

    response = await gateway.http.post(
        f"/admin/v1/workers/{seen['id']}/drain", params={"immediate": immediate}
    )

    assert response.json() == {"id": seen["id"], "status": "draining"}
    await worker.wait_until(lambda: worker.commands == [Drain(is_immediate=immediate)])


async def test_a_worker_is_drained_by_the_name_that_log_lines_give_it(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    (seen,) = (await status_of(gateway))["workers"]

    response = await gateway.http.post(f"/admin/v1/workers/worker.{seen['id']}/drain")

    assert response.status_code == 200


async def test_an_unknown_worker_is_not_drained(gateway: LiveGateway) -> None:
    response = await gateway.http.post("/admin/v1/workers/nobody/drain")

    assert response.status_code == 404


async def test_a_worker_that_leaves_is_listed_as_leaving(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    worker.announcement = msgspec.structs.replace(
        worker.announcement, is_leaving=True, end_notice="preempted"
    )

    async def is_leaving() -> bool:
        workers = (await status_of(gateway))["workers"]
        return [(one["state"], one["end_notice"]) for one in workers] == [("leaving", "preempted")]

    await eventually(is_leaving)


async def test_dead_letters_are_listed_and_counted(
    gateway: LiveGateway, letters: list[str], bus: MemoryBus
) -> None:
    async def are_counted() -> bool:
        return bool((await status_of(gateway))["num_dead_letters"] == len(letters))

    first = (await gateway.http.get(LETTERS)).json()["data"][0]

    assert await ids_of_letters(gateway) == letters
    assert (first["reason"], first["queue"]) == ("rejected", f"jobs.{UNSERVED}.batch")
    assert (first["can_retry"], first["user"]) == (True, bus.user)
    await eventually(are_counted)


async def test_a_retried_letter_is_in_its_queue_again(
    gateway: LiveGateway, letters: list[str], bus: MemoryBus
) -> None:
    response = await gateway.http.post(f"{LETTERS}/one/retry")

    assert response.json() == {"id": "one", "status": "retried"}
    assert await ids_of_letters(gateway) == ["two"]
    state = await bus.inspect(topology.jobs_queue(UNSERVED, "batch").name)
    assert state is not None
    assert state.num_ready == 1


async def test_a_dropped_letter_is_gone(gateway: LiveGateway, letters: list[str]) -> None:
    response = await gateway.http.delete(f"{LETTERS}/two")

    assert response.json() == {"id": "two", "status": "dropped"}
    assert await ids_of_letters(gateway) == ["one"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/x/retry"), ("DELETE", "/x")])
async def test_an_unknown_letter_is_not_found(
    gateway: LiveGateway, letters: list[str], method: str, path: str
) -> None:
    response = await gateway.http.request(method, f"{LETTERS}{path}")

    assert response.status_code == 404
    assert await ids_of_letters(gateway) == letters


@pytest.mark.parametrize(
    ("scopes", "status"), [(("generate", "cancel"), 403), (("generate", "cancel", "operator"), 200)]
)
async def test_an_operators_key_has_the_scope(
    broker: MemoryBroker, tmp_path: Path, scopes: tuple[str, ...], status: int
) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("alice", scopes=scopes)
    async with live_gateway(broker, keys_file=file.path) as gateway:
        headers = {"authorization": f"Bearer {key}"}
        response = await gateway.http.get(STATUS, headers=headers)
        without_key = await gateway.http.get(STATUS)

    assert response.status_code == status
    assert without_key.status_code == 401


async def test_a_gateway_that_anyone_may_reach_has_no_operator_without_a_key(
    bus: MemoryBus,
) -> None:
    async with live_gateway(bus, allow_anonymous=True) as gateway:
        response = await gateway.http.get(STATUS)

    assert response.status_code == 403
    assert "operator" in response.json()["error"]["message"]


async def test_keys_are_listed_with_their_limits_and_use(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    limited = file.add("alice", label="Web app", requests_per_minute=10, max_concurrent=2)
    operator = file.add("ops", scopes=("operator",))
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await gateway.http.post(
            "/v1/chat/completions",
            json=chat_body(),
            headers={"Authorization": f"Bearer {limited}"},
        )
        gateway.http.headers["Authorization"] = f"Bearer {operator}"
        alice, ops = (await status_of(gateway))["keys"]

    assert (alice["tenant"], alice["label"], alice["expires_at"]) == ("alice", "Web app", None)
    assert (alice["num_requests"], alice["requests_per_minute"]) == (1, 10)
    assert (alice["num_running"], alice["max_concurrent"]) == (0, 2)
    assert alice["tokens_per_minute"] is None
    assert (ops["num_requests"], ops["requests_per_minute"]) == (None, None)
