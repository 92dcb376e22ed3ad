"""Workers ask gateways about the jobs of publishers whose tenants have limits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.subscribe import receive
from shared.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Completed,
    EmbeddingJob,
    Ended,
    Failed,
    Finished,
    GenerationJob,
    LimitedTenants,
    QuickJob,
    SamplingParams,
    Started,
    TextPrompt,
    TokenizeJob,
    decode_event,
    decode_usage,
    encode,
)
from tests.support.workers.jobs import ask, new_job, num_ready, publish
from tests.support.workers.synthetic import echo_worker
from worker.jobs import admission
from worker.jobs.admission import TenantAdmission

Decide = Callable[[AdmissionRequest], AdmissionAnswer | None]
VALID_S = 3600.0
_NUMBERS = count()


class Edge:
    """A gateway that decides as a test says."""

    def __init__(self, bus: MemoryBus, name: str, decide: Decide) -> None:
        self.bus = bus
        self.name = name
        self.requests: list[AdmissionRequest] = []
        self.ended: asyncio.Queue[Ended] = asyncio.Queue()
        self._decide = decide
        self._answers: set[asyncio.Task[None]] = set()

    def hear(self, message: Message) -> None:
        fact = decode_usage(message.body)
        if isinstance(fact, Ended):
            self.ended.put_nowait(fact)
        if isinstance(fact, AdmissionRequest) and fact.gateway == self.name:
            self.requests.append(fact)
            answer = self._decide(fact)
            if answer is not None:
                sending = self.bus.publish(
                    topology.worker_binding(fact.worker), Message(encode(answer))
                )
                self._answers.add(asyncio.ensure_future(sending))

    async def limit(self, worker: str, *tenants: str) -> None:
        """Tell a worker which tenants have limits."""
        command = LimitedTenants(gateway=self.name, tenants=tenants, valid_s=VALID_S)
        await self.bus.publish(topology.worker_binding(worker), Message(encode(command)))


def admit(request: AdmissionRequest) -> AdmissionAnswer:
    return AdmissionAnswer(number=request.number, is_counted=True)


def refuse(request: AdmissionRequest) -> AdmissionAnswer:
    return AdmissionAnswer(number=request.number, code="insufficient_quota", message="All spent.")


def say_nothing(request: AdmissionRequest) -> None:
    return None


@asynccontextmanager
async def edge(broker: MemoryBroker, name: str, decide: Decide) -> AsyncIterator[Edge]:
    async with MemoryBus(broker, user="edge") as bus:
        one = Edge(bus, name, decide)
        listening = asyncio.create_task(receive(bus, topology.usage_queue(name), one.hear))
        try:
            yield one
        finally:
            listening.cancel()
            await asyncio.wait([listening])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not give a gateway up because the machine is busy."""
    monkeypatch.setattr(admission, "_PATIENCE_S", 120.0)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def alice(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The bus of a publisher beside a worker."""
    async with (
        MemoryBus(broker, user="worker-1") as bus,
        echo_worker(bus, trusted_users="edge", step_s=0.001),
        MemoryBus(broker, user="alice") as alice,
    ):
        yield alice


def job_of(user: str, sampling: SamplingParams | None = None) -> GenerationJob:
    job = new_job("echo", sampling=sampling)
    return msgspec.structs.replace(job, request_id=f"{user}.{next(_NUMBERS)}")


async def address_after(bus: MemoryBus) -> str:
    """The address of the worker, which answers a job before it has heard of any limit."""
    log = await ask(bus, job_of("alice"))
    assert isinstance(log.last, Finished)
    return str(log.reader.worker)


async def test_a_job_that_a_gateway_refuses_ends_with_its_error(
    broker: MemoryBroker, alice: MemoryBus
) -> None:
    async with (
        edge(broker, "g", refuse) as gateway,
        MemoryBus(broker, user="mallory") as mallory,
    ):
        worker = await address_after(alice)
        spoof = LimitedTenants(gateway="g", tenants=("mallory",), valid_s=VALID_S)
        await mallory.publish(topology.worker_binding(worker), Message(encode(spoof)))
        await gateway.limit(worker, "alice")
        refused = await ask(alice, job_of("alice"))
        others = [
            await ask(mallory, job_of("mallory")),
            await ask(gateway.bus, msgspec.structs.replace(new_job("echo"), tenant="alice")),
        ]
        await gateway.limit(worker)
        again = await ask(alice, job_of("alice"))

    assert refused.raw == [Failed(code="insufficient_quota", message="All spent.")]
    assert all(isinstance(log.last, Finished) for log in (*others, again))
    assert [request.tenant for request in gateway.requests] == ["alice"]


async def test_an_admitted_job_reports_its_end_and_tokens(
    broker: MemoryBroker, alice: MemoryBus
) -> None:
    job = msgspec.structs.replace(job_of("alice"), deadline=2_000_000_000.0)
    async with edge(broker, "g", admit) as gateway:
        await gateway.limit(await address_after(alice), "alice")
        log = await ask(alice, job)
        ended = await gateway.ended.get()

    assert isinstance(log.last, Finished)
    (started,) = (event for event in log.raw if isinstance(event, Started))
    num_tokens = sum(started.num_prompt_tokens) + len(log.token_ids)
    (request,) = gateway.requests
    assert (request.request_id, request.deadline) == (job.request_id, job.deadline)
    assert request.num_tokens == -(-len("Once upon a time") // 4) + (job.sampling.max_tokens or 0)
    assert ended == Ended(request_id=job.request_id, num_tokens=num_tokens)


async def test_a_job_may_have_as_many_tokens_as_the_gateway_says(
    broker: MemoryBroker, alice: MemoryBus
) -> None:
    def decide(request: AdmissionRequest) -> AdmissionAnswer:
        return AdmissionAnswer(number=request.number, max_total_tokens=5)

    async with edge(broker, "g", decide) as gateway:
        await gateway.limit(await address_after(alice), "alice")
        log = await ask(alice, job_of("alice"))

    assert isinstance(log.last, Failed)
    assert log.last.code == "invalid_request"


@pytest.mark.parametrize("kind", [TokenizeJob, EmbeddingJob])
async def test_quick_jobs_are_admitted_too(
    broker: MemoryBroker, alice: MemoryBus, kind: type[TokenizeJob] | type[EmbeddingJob]
) -> None:
    prompt = TextPrompt(text="word")
    request_id = f"alice.{next(_NUMBERS)}"
    job: TokenizeJob | EmbeddingJob = (
        TokenizeJob(request_id=request_id, model="echo", prompt=prompt)
        if kind is TokenizeJob
        else EmbeddingJob(request_id=request_id, model="echo", prompts=(prompt,))
    )
    answers = topology.reply_queue(request_id, expires_s=600)
    await alice.declare(answers)
    decisions = iter((admit, refuse))
    async with edge(broker, "g", lambda request: next(decisions)(request)) as gateway:
        await gateway.limit(await address_after(alice), "alice")
        events = []
        async with alice.consume(answers.name) as consumer:
            for _ in range(2):
                await publish(alice, job, "quick")
                events.append(decode_event((await anext(consumer)).message.body))
        ended = await gateway.ended.get()

    assert not (isinstance(events[0], Failed) and events[0].code == "insufficient_quota")
    assert events[1] == Failed(code="insufficient_quota", message="All spent.")
    assert ended.request_id == request_id


async def test_another_gateway_is_asked_if_the_first_one_is_silent(
    broker: MemoryBroker, alice: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_gateway = TenantAdmission._ask

    async def ask_with_patience(
        self: TenantAdmission, gateway: str, job: GenerationJob | QuickJob
    ) -> AdmissionAnswer | None:
        monkeypatch.setattr(admission, "_PATIENCE_S", 0.05 if gateway == "first" else 120.0)
        return await ask_gateway(self, gateway, job)

    monkeypatch.setattr(TenantAdmission, "_ask", ask_with_patience)
    async with (
        edge(broker, "first", say_nothing) as silent,
        edge(broker, "second", refuse) as other,
    ):
        worker = await address_after(alice)
        for gateway in (silent, other):
            await gateway.limit(worker, "alice")
        logs = [await ask(alice, job_of("alice")) for _ in range(2)]

    assert [log.last for log in logs] == [
        Failed(code="insufficient_quota", message="All spent.")
    ] * 2
    assert (len(silent.requests), len(other.requests)) == (1, 2)


async def test_jobs_run_if_no_gateway_answers(
    broker: MemoryBroker,
    alice: MemoryBus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with edge(broker, "g", say_nothing) as silent:
        await silent.limit(await address_after(alice), "alice")
        monkeypatch.setattr(admission, "_PATIENCE_S", 0.05)
        logs = [await ask(alice, job_of("alice")) for _ in range(2)]

    assert all(isinstance(log.last, Finished) for log in logs)
    assert len(silent.requests) == 1
    assert caplog.messages.count("limits not checked") == 1


@pytest.mark.parametrize("late", [admit, refuse])
async def test_a_job_that_is_delivered_again_while_a_gateway_decides_ends_once(
    broker: MemoryBroker, late: Callable[[AdmissionRequest], AdmissionAnswer]
) -> None:
    job = msgspec.structs.replace(job_of("alice"), mode="final")
    answers = topology.reply_queue(job.request_id, expires_s=600)
    asked = asyncio.Event()

    def decide(request: AdmissionRequest) -> AdmissionAnswer | None:
        if request.request_id != job.request_id:
            return admit(request)
        asked.set()
        return None

    async with (
        MemoryBus(broker, user="worker-1") as of_worker,
        echo_worker(of_worker, trusted_users="edge", step_s=0.001),
        MemoryBus(broker, user="alice") as alice,
        edge(broker, "g", decide) as gateway,
    ):
        await gateway.limit(await address_after(alice), "alice")
        await alice.declare(answers)
        async with alice.consume(answers.name, prefetch=1) as consumer:
            await publish(alice, job)
            await asked.wait()
            of_worker.sever()
            first = decode_event((await anext(consumer)).message.body)
            ends = [await gateway.ended.get()]
            (request,) = gateway.requests
            answer = Message(encode(late(request)))
            await gateway.bus.publish(topology.worker_binding(request.worker), answer)
            other = job_of("alice")
            await ask(alice, other)
            ends.append(await gateway.ended.get())
            num_more = await num_ready(alice, answers.name)

    assert isinstance(first, Completed)
    assert num_more == 0
    assert [ended.request_id for ended in ends] == [job.request_id, other.request_id]
    assert gateway.ended.empty()
