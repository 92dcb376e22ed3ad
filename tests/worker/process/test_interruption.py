"""A worker whose machine is about to end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from shared import settings, topology
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import StartupError
from shared.messages import SamplingParams, decode_announcement
from shared.settings import WorkerSettings
from tests.support.deployment.processes import free_port
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import ask, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker
from worker.process import interruption
from worker.process.interruption import CLOUDS, MetadataServer, read_notice, wait_for_notice

NOTICE = {"action": "terminate", "time": "2026-11-29T08:22:00Z"}
TOKEN = "secret-of-the-session"
NAME, OTHER_NAME = "workers_1", "workers_11"


class Machine:
    """A machine of every cloud, with its metadata as the clouds document it."""

    def __init__(self) -> None:
        self.is_ending = False
        self.is_other_ending = False
        """Whether another machine of the same scale set is ending."""

    async def token(self, request: Request) -> Response:
        assert request.headers["x-aws-ec2-metadata-token-ttl-seconds"]
        return PlainTextResponse(TOKEN)

    async def action(self, request: Request) -> Response:
        if request.headers.get("x-aws-ec2-metadata-token") != TOKEN:
            return PlainTextResponse("", status_code=401)
        return JSONResponse(NOTICE) if self.is_ending else PlainTextResponse("", status_code=404)

    async def preempted(self, request: Request) -> Response:
        if request.headers.get("metadata-flavor") != "Google":
            return PlainTextResponse("", status_code=403)
        return PlainTextResponse("TRUE" if self.is_ending else "FALSE")

    async def events(self, request: Request) -> Response:
        if request.headers.get("metadata") != "true":
            return PlainTextResponse("", status_code=400)
        events = [
            {"EventType": "Reboot", "Resources": [NAME]},
            *([{"EventType": "Preempt", "Resources": [OTHER_NAME]}] * self.is_other_ending),
            *([{"EventType": "Preempt", "Resources": [OTHER_NAME, NAME]}] * self.is_ending),
        ]
        return JSONResponse({"Events": events})

    async def name(self, request: Request) -> Response:
        if request.headers.get("metadata") != "true" or request.query_params["format"] != "text":
            return PlainTextResponse("", status_code=400)
        return PlainTextResponse(NAME)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/latest/api/token", self.token, methods=["PUT"]),
                Route("/latest/meta-data/spot/instance-action", self.action),
                Route("/computeMetadata/v1/instance/preempted", self.preempted),
                Route("/metadata/scheduledevents", self.events),
                Route("/metadata/instance/compute/name", self.name),
            ]
        )


@asynccontextmanager
async def metadata_of(machine: Machine) -> AsyncIterator[Mapping[str, MetadataServer]]:
    """The clouds, at the address of a server of this machine."""
    server = uvicorn.Server(uvicorn.Config(machine.app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (the server tells nobody)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield {
            name: MetadataServer(f"http://127.0.0.1:{port}", cloud.read)
            for name, cloud in CLOUDS.items()
        }
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_cloud_gives_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_TIMEOUT_S", 120.0)
    machine = Machine()
    async with metadata_of(machine) as clouds:
        before = await read_notice(name, clouds)
        machine.is_ending = True
        after = await read_notice(name, clouds)

    assert before == ""
    assert ("terminate" in after) or (after.lower() in ("preempted", "preempt"))


async def test_the_end_of_another_machine_of_a_scale_set_is_no_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interruption, "_TIMEOUT_S", 120.0)
    machine = Machine()
    machine.is_other_ending = True
    async with metadata_of(machine) as clouds:
        assert await read_notice("azure", clouds) == ""


@pytest.mark.parametrize("name", CLOUDS)
async def test_the_metadata_of_a_cloud_may_have_another_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "_TIMEOUT_S", 120.0)
    machine = Machine()
    machine.is_ending = True
    async with metadata_of(machine) as clouds:
        notice = await read_notice(f"{name}={clouds[name].url}")

    assert notice


async def test_a_signal_gives_notice_and_ends_nothing() -> None:
    place = "signal:SIGUSR2"
    before = await read_notice(place)
    waiting = asyncio.create_task(wait_for_notice(place, 600.0, lambda error, num: None))
    await asyncio.sleep(0)  # it listens

    os.kill(os.getpid(), signal.SIGUSR2)
    notice = await waiting
    os.kill(os.getpid(), signal.SIGUSR2)

    assert (before, notice) == ("", "SIGUSR2")


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_machine_without_metadata_is_an_error(name: str) -> None:
    gone = {name: MetadataServer(f"http://127.0.0.1:{free_port()}", CLOUDS[name].read)}

    with pytest.raises(httpx.HTTPError):
        await read_notice(name, gone)


async def test_a_notice_is_read_although_looks_before_have_failed() -> None:
    looks: Iterator[Exception | str] = iter(
        [httpx.ConnectTimeout(""), ValueError(), "", httpx.ConnectError(""), "terminate"]
    )

    async def look(client: httpx.AsyncClient) -> str:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    failed = list[tuple[type[Exception], int]]()
    clouds = {"aws": MetadataServer("http://127.0.0.1", look)}

    notice = await wait_for_notice(
        "aws", 0.0, lambda error, num: failed.append((type(error), num)), clouds
    )

    assert notice == "terminate"
    assert failed == [(httpx.ConnectTimeout, 1), (ValueError, 2), (httpx.ConnectError, 1)]


@pytest.mark.parametrize("kind", ["file", "signal"])
async def test_a_worker_with_notice_hands_its_jobs_over_at_once(kind: str, tmp_path: Path) -> None:
    broker, notice = MemoryBroker(), tmp_path / "notice"
    job = new_job("echo", sampling=SamplingParams(max_tokens=200, ignore_eos=True))
    places: Mapping[str, tuple[str, Callable[[], object]]] = {
        "file": (str(notice), notice.touch),
        "signal": ("signal:SIGUSR1", partial(os.kill, os.getpid(), signal.SIGUSR1)),
    }
    place, give_notice = places[kind]
    options: dict[str, Any] = {
        "interruption_notice": place,
        "notice_interval_s": 0.01,
        "drain_grace_s": 600,
    }
    async with MemoryBus(broker) as bus:
        async with echo_worker(bus):
            undisturbed = await ask(bus, job)
        async with (
            reading(bus, job) as consumer,
            echo_worker(broker, brake=Brake(2), **options) as stopped,
        ):
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=1)
            give_notice()
            async with echo_worker(broker):
                log = await read(bus, job, consumer, log)
            await stopped.wait()

    assert log.token_ids == undisturbed.token_ids
    assert (log.reader.attempt, log.reader.num_lost_runs) == (2, 0)


async def test_a_worker_with_notice_says_why_it_leaves(tmp_path: Path) -> None:
    notice, queue = tmp_path / "notice", topology.announcements_queue("test")
    options: dict[str, Any] = {"interruption_notice": str(notice), "notice_interval_s": 0.01}
    async with MemoryBus() as bus:
        await bus.declare(queue)
        async with bus.consume(queue.name) as consumer, echo_worker(bus, **options):
            notice.touch()
            async for delivery in consumer:
                said = decode_announcement(delivery.message.body)
                if said.is_leaving:
                    break

    assert said.end_notice == str(notice)


async def test_a_worker_does_not_start_on_a_machine_that_ends(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    notice.touch()

    with pytest.raises(StartupError, match="This machine ends soon"):
        async with MemoryBus() as bus, echo_worker(bus, interruption_notice=str(notice)):
            pass


@pytest.mark.parametrize(
    "place",
    [*CLOUDS, "aws=http://127.0.0.1:1338", "signal:SIGUSR1", "/run/notice", "/run/a=b", ""],
)
def test_clouds_signals_and_absolute_paths_are_places_of_notice(place: str) -> None:
    loaded = settings.load(WorkerSettings, interruption_notice=place)

    assert loaded.interruption_notice == place


@pytest.mark.parametrize(
    "place", ["oracle", "aws=", "aws=127.0.0.1", "aws=http://", "signal:SIGTERM", "notice"]
)
def test_another_place_is_refused(place: str) -> None:
    with pytest.raises(StartupError, match="expected aws, gcp or azure, which may be followed by"):
        settings.load(WorkerSettings, interruption_notice=place)
