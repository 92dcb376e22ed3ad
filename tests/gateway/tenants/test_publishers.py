"""What gateways do for the jobs of publishers whose tenants have limits."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import msgspec

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.key_file import KeyFile
from gateway.intake.keys.tenant_limits import NO_LIMITS, TenantLimits
from gateway.intake.limits import Limits
from gateway.tenants.publishers import PublisherAdmission
from shared import topology
from shared.bus.base import Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import QuotaExceeded
from shared.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Command,
    Ended,
    Failed,
    Finished,
    LimitedTenants,
    decode_command,
    encode,
)
from tests.support.gateway.http import chat_body, eventually, live_gateway, running_limits
from tests.support.workers.jobs import Log, ask, new_job, num_ready
from tests.support.workers.synthetic import echo_worker

WORKER = topology.worker_queue("1")
ADDRESS = WORKER.bindings[0].routing_key
FOR_LONG = 4_000_000_000.0


async def commands(bus: MemoryBus, queue: Queue = WORKER) -> list[Command]:
    """What is in a worker's control queue."""
    read, num = [], await num_ready(bus, queue.name)
    async with bus.consume(queue.name) as consumer:
        for _ in range(num):
            delivery = await anext(consumer)
            read.append(decode_command(delivery.message.body))
            await delivery.ack()
    return read


class Office:
    """The admission of a gateway, and the worker that asks it."""

    def __init__(self, bus: MemoryBus, keys: Keys, limits: Limits, now: list[float]) -> None:
        self.keys = keys
        self.limits = limits
        self.now = now
        self.addresses = ["worker.gone", ADDRESS]
        self.admission = PublisherAdmission(
            bus, keys, limits, lambda: self.addresses, lambda: now[0]
        )
        self._bus = bus
        self._number = 0

    def set(self, **limits: TenantLimits) -> None:
        self.keys.accept_stored({}, limits)

    async def told(self) -> list[tuple[str, ...]]:
        """The tenants that the worker is told now."""
        await self.admission.tell()
        told = [one for one in await commands(self._bus) if isinstance(one, LimitedTenants)]
        assert {one.gateway for one in told} <= {self.limits.name}
        return [one.tenants for one in told]

    async def ask(self, request_id: str, num_tokens: int = 0) -> AdmissionAnswer:
        self._number += 1
        request = AdmissionRequest(
            gateway=self.limits.name,
            worker=ADDRESS,
            number=self._number,
            request_id=request_id,
            tenant="alice",
            num_tokens=num_tokens,
            deadline=FOR_LONG,
        )
        self.admission.hear(request)
        async with self._bus.consume(WORKER.name) as consumer:
            delivery = await anext(consumer)
            await delivery.ack()
        answer = decode_command(delivery.message.body)
        assert isinstance(answer, AdmissionAnswer)
        assert answer.number == self._number
        return answer

    async def end(self, request_id: str, num_tokens: int) -> None:
        """Report the end of a job, as a worker does, and wait until the gateway knows."""
        used = self.limits.use_of_tenant("alice")
        ended = Ended(request_id=request_id, num_tokens=num_tokens)
        await self._bus.publish(topology.USAGE, Message(encode(ended)))

        async def is_known() -> bool:
            return self.limits.use_of_tenant("alice") != used

        await eventually(is_known)


@asynccontextmanager
async def office(of_alice: TenantLimits = NO_LIMITS) -> AsyncIterator[Office]:
    async with MemoryBus() as bus:
        await bus.declare(WORKER)
        keys, limits, now = Keys(None), Limits(bus, max_detached=3), [0.0]
        one = Office(bus, keys, limits, now)
        one.set(alice=of_alice)
        async with running_limits(limits, bus, one.admission.hear):
            yield one


async def test_workers_are_told_which_tenants_have_limits_or_budgets() -> None:
    async with office() as one:
        nobody = await one.told()
        one.set(
            bob=TenantLimits(max_concurrent=1),
            alice=TenantLimits(monthly_budget=Decimal(1)),
            carol=TenantLimits(max_detached=1),
        )
        changed, unchanged = await one.told(), await one.told()
        one.now[0] += 5.0
        repeated = await one.told()
        one.set(bob=TenantLimits(max_concurrent=2))
        fewer = await one.told()
        await one.admission.leave()
        left, afterwards = await one.told(), await one.told()

    assert (nobody, changed, unchanged) == ([], [("alice", "bob")], [])
    assert (repeated, fewer) == ([("alice", "bob")], [("bob",)])
    assert (left, afterwards) == ([()], [])


async def test_a_new_worker_is_told_at_once() -> None:
    async with office(TenantLimits(max_concurrent=1)) as one:
        one.addresses = []
        nobody = await one.told()
        one.addresses = [ADDRESS]
        new = await one.told()

    assert (nobody, new) == ([], [("alice",)])


async def test_no_more_jobs_run_at_once_than_the_tenant_may_have() -> None:
    async with office(TenantLimits(max_concurrent=2)) as one:
        first = [await one.ask(f"alice.{number}") for number in range(3)]
        await one.end("alice.0", num_tokens=1)
        later = [await one.ask(f"alice.{number}") for number in (3, 4)]

    assert [answer.code for answer in first] == ["", "", "rate_limit_exceeded"]
    assert [answer.code for answer in later] == ["", "rate_limit_exceeded"]
    assert first[0].is_counted
    assert "concurrent requests of the tenant alice: Limit 2, Used 2" in first[2].message


async def test_the_tokens_of_a_job_are_estimated_until_its_worker_has_counted_them() -> None:
    async with office(TenantLimits(tokens_per_minute=100)) as one:
        running, refused = await one.ask("alice.1", 80), await one.ask("alice.2", 30)
        await one.end("alice.1", num_tokens=60)
        admitted, impossible = await one.ask("alice.3", 30), await one.ask("alice.4", 101)

    assert (running.code, running.max_total_tokens) == ("", 100)
    assert refused.code == "rate_limit_exceeded"
    assert admitted.code == ""
    assert (impossible.code, impossible.param) == ("invalid_request", "max_tokens")


async def test_every_job_counts_although_a_publisher_gives_all_the_same_id() -> None:
    async with office(TenantLimits(requests_per_minute=2, tokens_per_minute=1000)) as one:
        answers = [await one.ask("alice.1", 10) for _ in range(3)]
        use = one.limits.use_of_tenant("alice")

    assert [answer.code for answer in answers] == ["", "", "rate_limit_exceeded"]
    assert (use.num_requests, use.num_tokens) == (2, 20)


async def test_a_publisher_that_has_spent_its_budget_is_refused() -> None:
    def require(tenant: str) -> None:
        raise QuotaExceeded(f"{tenant} has spent it")

    async with MemoryBus() as bus:
        await bus.declare(WORKER)
        limits = Limits(bus, max_detached=3, require_budget=require)
        one = Office(bus, Keys(None), limits, [0.0])
        async with running_limits(limits, bus, one.admission.hear):
            answer = await one.ask("alice.1")

    assert (answer.code, answer.message) == ("insufficient_quota", "alice has spent it")


async def test_requests_over_http_and_jobs_over_amqp_share_the_limits_of_a_tenant(
    migrated_file: Path, tmp_path: Path
) -> None:
    shutil.copy(migrated_file, tmp_path)
    file = KeyFile(tmp_path / "keys")
    of_operator = bearer(file.add("ops", scopes=("operator",)))
    of_alice = bearer(file.add("alice"))
    broker = MemoryBroker()
    logs: list[Log] = []
    async with (
        MemoryBus(broker, user="gateway") as at_gateway,
        live_gateway(at_gateway, data_dir=tmp_path, keys_file=file.path) as gateway,
        MemoryBus(broker, user="worker") as at_worker,
        echo_worker(at_worker, trusted_users="gateway"),
        MemoryBus(broker, user="alice") as alice,
    ):
        http, limits = gateway.http, {"requests_per_minute": 2}
        await http.post("/admin/v1/tenants/alice", json=limits, headers=of_operator)

        async def is_refused() -> bool:
            job = msgspec.structs.replace(new_job("echo"), request_id=f"alice.{len(logs)}")
            logs.append(await ask(alice, job))
            return isinstance(logs[-1].last, Failed)

        await eventually(is_refused)  # once the worker was told
        listed = (await http.get("/admin/v1/tenants/alice", headers=of_operator)).json()
        body = chat_body(model="echo")
        answer = await http.post("/v1/chat/completions", json=body, headers=of_alice)

    refused = logs[-1].last
    assert isinstance(refused, Failed)
    assert refused.code == answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.message == answer.json()["error"]["message"]
    assert all(isinstance(log.last, Finished) for log in logs[:-1])
    assert listed["num_requests"] == 2


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
