"""The limits of API keys, over several gateways."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec import structs

from gateway.intake.keys.api_key import ApiKey
from gateway.intake.keys.tenant_limits import TenantLimits
from gateway.intake.limits import Limits
from shared.bus.base import Binding, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import RateLimited, Unroutable
from shared.messages import (
    DetachedJob,
    Ended,
    GenerationJob,
    TextPrompt,
    UsageReport,
    decode_usage,
    encode,
)
from tests.support.gateway.http import eventually, running_limits

START = 1_800_000_000.0
SHARES = (80, 15, 5)
"""How the load is spread over the gateways."""


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class SlowBus(MemoryBus):
    """Publishes after a number of turns of the event loop that differs each time."""

    def __init__(self, broker: MemoryBroker, seed: int) -> None:
        super().__init__(broker)
        self._random = random.Random(seed)

    async def publish(self, binding: Binding, message: Message) -> None:
        for _ in range(self._random.randrange(20)):
            await asyncio.sleep(0)
        await super().publish(binding, message)


class DeafBus(MemoryBus):
    """Loses what is published while it is deaf."""

    is_deaf = False

    async def publish(self, binding: Binding, message: Message) -> None:
        if not self.is_deaf:
            await super().publish(binding, message)


class UnboundBus(MemoryBus):
    """Has no queue to which it could route for a while, as while a broker deletes and gateways
    declare theirs."""

    num_unroutable = 0

    async def publish(self, binding: Binding, message: Message) -> None:
        if self.num_unroutable:
            self.num_unroutable -= 1
            raise Unroutable(binding.routing_key)
        await super().publish(binding, message)


class RecordingBus(MemoryBus):
    """Keeps the reports that are published."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[UsageReport] = []

    async def publish(self, binding: Binding, message: Message) -> None:
        fact = decode_usage(message.body)
        if isinstance(fact, UsageReport):
            self.reports.append(fact)
        await super().publish(binding, message)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gateways(clock: Clock) -> AsyncIterator[list[Limits]]:
    """Three gateways on a common broker."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        yield [await opened(stack, broker, clock, seed) for seed in range(3)]


async def opened(stack: AsyncExitStack, broker: MemoryBroker, clock: Clock, seed: int) -> Limits:
    return await opened_over(stack, SlowBus(broker, seed), clock)


async def opened_over(stack: AsyncExitStack, bus: MemoryBus, clock: Clock) -> Limits:
    await stack.enter_async_context(bus)
    limits = Limits(bus, max_detached=3, clock=clock, retry_pause_s=0.0)
    return await stack.enter_async_context(running_limits(limits, bus))


def key(**limits: Any) -> ApiKey:
    return ApiKey("00aa", "alice", "", "", **limits)


def keys_of(tenant: TenantLimits, *, own: int | None = None) -> tuple[ApiKey, ApiKey]:
    """Two keys of a tenant, of which the first has a limit of requests of its own."""
    first = ApiKey("00aa", "alice", "", "", requests_per_minute=own, of_tenant=tenant)
    return first, ApiKey("00bb", "alice", "", "", of_tenant=tenant)


def detached_job(request_id: str, clock: Clock) -> GenerationJob:
    return GenerationJob(
        request_id=request_id,
        model="m",
        prompts=(TextPrompt(text="a"),),
        tenant="alice",
        is_detached=True,
        deadline=clock.now + 3600,
    )


def running_job(request_id: str, clock: Clock) -> GenerationJob:
    job = detached_job(request_id, clock)
    return structs.replace(job, is_detached=False, deadline=clock.now + 600)


def use_of(limits: Limits, key: ApiKey) -> tuple[int, int]:
    """The tokens of the last minute, and the requests and jobs that run."""
    use_now = limits.use_of(key)
    assert use_now is not None
    return use_now.num_tokens, use_now.num_running


async def heard() -> None:
    """Wait until every gateway has heard what the others have announced."""
    for _ in range(200):
        await asyncio.sleep(0)


async def use(limits: Limits, key: ApiKey, reserved: int, really: int) -> int:
    """Send a request; returns what it used, or -1 if it was refused."""
    try:
        async with limits.admit(key, reserved) as grant:
            grant.note_published()
            grant.settle(really)
    except RateLimited:
        return -1
    return really


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("limit", "kind"), [(60, "requests"), (600, "requests"), (60_000, "tokens")]
)
async def test_a_skewed_load_uses_a_minutes_limit_within_five_percent(
    gateways: list[Limits], clock: Clock, limit: int, kind: str, seed: int
) -> None:
    """Two minutes with a burst at the start, and four times what the key may have."""
    source = random.Random(seed)
    one = key(**{f"{kind}_per_minute": limit})
    size = 1 if kind == "requests" else 200
    per_step = 4 * limit / size / 60 / 2
    used: Counter[int] = Counter()
    for step in range(240):
        clock.now = START + step / 2
        num = round(per_step * (10 if not step else source.uniform(0, 2)))
        who = source.choices(gateways, SHARES, k=num)
        costs = await asyncio.gather(*(use(limits, one, size, size) for limits in who))
        used[step] += sum(size if kind == "tokens" else 1 for cost in costs if cost >= 0)

    minutes = [sum(used[step] for step in range(first, first + 120)) for first in range(121)]
    assert max(minutes) <= limit
    assert min(minutes[::120]) >= 0.95 * limit


async def test_what_was_reserved_and_not_used_is_returned(gateways: list[Limits]) -> None:
    one = key(tokens_per_minute=1000)

    used = []
    for number in range(8):
        used.append(await use(gateways[number % 3], one, 400, 100))
        await heard()

    assert used == [100] * 7 + [-1]


async def test_requests_at_the_same_time_are_counted_at_all_gateways(
    gateways: list[Limits],
) -> None:
    one = key(max_concurrent=3)
    async with AsyncExitStack() as running:
        for limits in gateways:
            await running.enter_async_context(limits.admit(one))

        with pytest.raises(RateLimited, match="Limit 3, Used 3"):
            await running.enter_async_context(gateways[0].admit(one))
    await heard()
    async with AsyncExitStack() as running:
        for _ in range(3):
            await running.enter_async_context(gateways[1].admit(one))


async def test_a_gateway_that_begins_counts_what_the_others_have_admitted(clock: Clock) -> None:
    one, broker = key(requests_per_minute=2), MemoryBroker()
    async with AsyncExitStack() as stack:
        first = await opened(stack, broker, clock, 0)
        assert [await use(first, one, 0, 0) for _ in range(2)] == [0, 0]
        job = detached_job("req-0", clock)
        async with first.admit(key(max_detached=1), job=job) as grant:
            grant.note_published()

        second = await opened(stack, broker, clock, 1)

        assert await use(second, one, 0, 0) == -1
        with pytest.raises(RateLimited):
            async with second.admit(key(max_detached=1), job=detached_job("req-1", clock)):
                pass


async def test_the_requests_of_a_gateway_that_died_are_forgotten(clock: Clock) -> None:
    one, broker = key(max_concurrent=1), MemoryBroker()
    async with AsyncExitStack() as stack:
        first = await opened(stack, broker, clock, 0)
        async with AsyncExitStack() as others:
            second = await opened(others, broker, clock, 1)
            running = second.admit(one)
            await running.__aenter__()
            assert await use(first, one, 0, 0) == -1
        clock.now += 11

        assert await use(first, one, 0, 0) == 0
        await running.__aexit__(None, None, None)


async def test_a_clock_that_is_set_back_returns_what_was_used_before(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(requests_per_minute=3)
    assert [await use(limits, one, 0, 0) for limits in gateways] == [0, 0, 0]
    await heard()

    clock.now -= 3600

    assert [await use(limits, one, 0, 0) for limits in gateways] == [0, 0, 0]
    assert await use(gateways[0], one, 0, 0) == -1


async def test_a_gateway_that_died_before_the_clock_was_set_back_is_forgotten(
    clock: Clock,
) -> None:
    one, broker = key(max_concurrent=1), MemoryBroker()
    async with AsyncExitStack() as stack:
        first = await opened(stack, broker, clock, 0)
        async with AsyncExitStack() as others:
            second = await opened(others, broker, clock, 1)
            running = second.admit(one)
            await running.__aenter__()
        clock.now -= 3600
        assert await use(first, one, 0, 0) == -1
        clock.now += 11

        assert await use(first, one, 0, 0) == 0
        await running.__aexit__(None, None, None)


async def test_a_detached_job_counts_until_its_worker_says_that_it_has_ended(
    gateways: list[Limits], clock: Clock
) -> None:
    first, other, _ = gateways
    one = key(tokens_per_minute=1000, max_detached=2)
    for number in range(2):
        job = detached_job(f"req-{number}", clock)
        async with first.admit(one, 400, job) as grant:
            grant.note_published()
            grant.settle(1)  # its worker knows better
        await heard()
    with pytest.raises(RateLimited, match="detached requests of the tenant alice: Limit 2, Used 2"):
        async with other.admit(one, 100, detached_job("req-2", clock)):
            pass

    for limits in gateways:
        limits.hear(Ended(request_id="req-0", num_tokens=100))
    await heard()

    async with other.admit(one, 400, detached_job("req-3", clock)) as grant:
        grant.note_published()


async def test_a_report_that_is_older_than_an_end_does_not_bring_its_job_back(
    gateways: list[Limits], clock: Clock
) -> None:
    first, other, _ = gateways
    one = key(max_detached=1)
    job = detached_job("req-0", clock)
    async with first.admit(one, job=job) as grant:
        grant.note_published()
    await heard()
    assert job.deadline is not None
    late = UsageReport(
        gateway=first.name, number=9, detached={"req-0": DetachedJob(job.tenant, job.deadline)}
    )

    for limits in gateways:
        limits.hear(Ended(request_id="req-0", num_tokens=100))
    other.hear(late)

    async with other.admit(one, job=detached_job("req-1", clock)) as grant:
        grant.note_published()


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize("again", [0, 1])
async def test_a_detached_job_that_is_claimed_again_counts_once_and_does_not_end(
    gateways: list[Limits], clock: Clock, again: int, is_published: bool
) -> None:
    one = key(tokens_per_minute=1000, max_detached=1)
    async with gateways[0].admit(one, 400, detached_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()

    async with gateways[again].admit(one, 500, detached_job("req-0", clock)) as grant:
        if is_published:
            grant.note_published()
    await heard()

    for limits in gateways:
        with pytest.raises(RateLimited, match="of the tenant alice: Limit 1, Used 1"):
            async with limits.admit(one, job=detached_job("req-1", clock)):
                pass
        limits.hear(Ended(request_id="req-0", num_tokens=100))
    await heard()
    use_now = gateways[2].use_of(one)
    assert use_now is not None
    assert use_now.num_tokens == 100


async def test_a_claim_that_is_given_up_does_not_end_the_job_of_an_earlier_one(
    clock: Clock,
) -> None:
    one = key(max_detached=1)
    async with DeafBus() as bus, running_limits(Limits(bus, 1, clock), bus) as limits:
        async with limits.admit(one, job=detached_job("req-0", clock)) as grant:
            grant.note_published()
        await heard()
        bus.is_deaf = True
        admission = limits.admit(one, job=detached_job("req-0", clock))
        asking = asyncio.create_task(admission.__aenter__())
        await heard()
        asking.cancel()
        await asyncio.wait([asking])

        with pytest.raises(RateLimited, match="unfinished detached requests"):
            async with limits.admit(one, job=detached_job("req-1", clock)):
                pass


async def test_a_detached_job_that_is_never_ended_counts_until_its_deadline(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_detached=1)
    async with gateways[0].admit(one, job=detached_job("req-0", clock)) as grant:
        grant.note_published()

    clock.now += 3601

    async with gateways[0].admit(one, job=detached_job("req-1", clock)):
        pass


async def test_a_gateway_without_a_quiet_moment_forgets_detached_jobs_at_their_deadline(
    clock: Clock,
) -> None:
    one = key(tokens_per_minute=1000)
    async with (
        MemoryBus() as bus,
        running_limits(Limits(bus, 1, clock, heartbeat_s=0.02), bus) as limits,
    ):
        async with limits.admit(one, 400, detached_job("req-0", clock)) as grant:
            grant.note_published()
        clock.now += 3601
        for _ in range(20):
            limits.end("another")
            await asyncio.sleep(0.005)

        limits.hear(Ended(request_id="req-0", num_tokens=500))

        use_now = limits.use_of(one)
    assert use_now is not None
    assert use_now.num_tokens == 0


async def test_detached_jobs_that_other_gateways_claimed_are_forgotten_at_their_deadline(
    clock: Clock,
) -> None:
    job = DetachedJob("alice", clock.now + 3600)
    async with (
        RecordingBus() as bus,
        running_limits(Limits(bus, 1, clock, heartbeat_s=0.02), bus) as limits,
    ):
        limits.hear(UsageReport(gateway="another", number=1, detached={"req-0": job}))
        clock.now += 3601
        await asyncio.sleep(0.1)

        limits.hear(UsageReport(gateway="new", number=1, is_new=True))
        await heard()

    assert [report.detached for report in bus.reports] == [{}, {}]


async def test_a_job_whose_client_has_left_runs_at_all_gateways_until_its_worker_reports_its_end(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1, tokens_per_minute=1000)
    async with gateways[0].admit(one, 400, running_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()
    assert [await use(limits, one, 0, 0) for limits in gateways] == [-1, -1, -1]

    for limits in gateways:
        limits.hear(Ended(request_id="req-0", num_tokens=700))
    await heard()

    assert [use_of(limits, one) for limits in gateways] == [(700, 0)] * 3


async def test_a_job_whose_client_has_left_ends_with_the_record_of_its_usage(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1)
    async with gateways[0].admit(one, job=running_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()

    gateways[1].hear_record("req-0")
    await heard()

    assert [use_of(limits, one)[1] for limits in gateways] == [0] * 3


async def test_an_end_that_comes_before_the_report_of_the_gateway_brings_no_job_back(
    gateways: list[Limits], clock: Clock
) -> None:
    first, other, _ = gateways
    one = key(max_concurrent=1)
    ended = Ended(request_id="req-0", num_tokens=5)
    async with first.admit(one, job=running_job("req-0", clock)) as grant:
        grant.note_published()
    other.hear(ended)
    await heard()

    first.hear(ended)
    await heard()

    assert use_of(other, one) == (5, 0)


async def test_an_end_that_the_gateway_hears_while_its_client_does_not_read_counts(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1, tokens_per_minute=1000)
    async with gateways[0].admit(one, 400, running_job("req-0", clock)) as grant:
        grant.note_published()
        gateways[0].hear(Ended(request_id="req-0", num_tokens=50))
    await heard()

    assert [use_of(limits, one) for limits in gateways] == [(50, 0)] * 3


async def test_a_request_that_is_sent_again_is_admitted_beside_its_own_job(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1, tokens_per_minute=1000)
    async with gateways[0].admit(one, 400, running_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()
    for number in (1, 0):
        async with gateways[number].admit(one, 400, running_job("req-0", clock)) as grant:
            grant.note_published()
            await heard()
            assert use_of(gateways[2], one) == (400, 1)
        await heard()
    assert [use_of(limits, one) for limits in gateways] == [(400, 1)] * 3

    for limits in gateways:
        limits.hear(Ended(request_id="req-0", num_tokens=50))
    await heard()

    assert [use_of(limits, one) for limits in gateways] == [(50, 0)] * 3


async def test_another_request_that_is_refused_under_the_key_of_a_job_does_not_end_it(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1)
    async with gateways[0].admit(one, job=running_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()

    async with gateways[1].admit(one, job=running_job("req-0", clock)):
        pass  # its body differs, so it is not published
    await heard()

    assert [use_of(limits, one) for limits in gateways] == [(0, 1)] * 3


async def test_a_job_that_is_cancelled_before_it_begins_counts_for_seconds(
    clock: Clock,
) -> None:
    one = key(max_concurrent=1, tokens_per_minute=1000)
    async with (
        RecordingBus() as bus,
        running_limits(Limits(bus, 1, clock, heartbeat_s=0.02), bus) as limits,
    ):
        async with limits.admit(one, 400, running_job("req-0", clock)) as grant:
            grant.note_published()
            grant.drop()
        assert use_of(limits, one) == (400, 1)

        clock.now += 6

        async def has_none() -> bool:
            return use_of(limits, one) == (0, 0)

        await eventually(has_none)


async def test_a_gateway_that_begins_hears_of_jobs_whose_clients_have_left(clock: Clock) -> None:
    one, broker = key(max_concurrent=1), MemoryBroker()
    async with AsyncExitStack() as stack:
        first = await opened(stack, broker, clock, 0)
        async with first.admit(one, job=running_job("req-0", clock)) as grant:
            grant.note_published()

        second = await opened(stack, broker, clock, 1)

        assert await use(second, one, 0, 0) == -1


async def test_a_job_whose_end_is_never_reported_counts_until_its_deadline(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1)
    async with gateways[0].admit(one, job=running_job("req-0", clock)) as grant:
        grant.note_published()
    await heard()

    clock.now += 601

    assert [use_of(limits, one) for limits in gateways] == [(0, 0)] * 3


async def test_the_line_of_a_batch_that_is_tried_again_counts_until_its_second_job_ends(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_concurrent=1, tokens_per_minute=1000)
    job = detached_job("req-0", clock)
    async with gateways[0].admit(one, 400, job, is_batch_line=True) as grant:
        grant.note_published()
        grant.settle(10)
        grant.note_published()
    await heard()
    assert use_of(gateways[1], one) == (10, 1)

    for limits in gateways:
        limits.hear(Ended(request_id="req-0", num_tokens=50))
    await heard()

    assert [use_of(limits, one) for limits in gateways] == [(50, 0)] * 3


async def test_a_refused_or_unpublished_detached_request_leaves_nothing(
    gateways: list[Limits], clock: Clock
) -> None:
    one = key(max_detached=1)
    for number in range(3):
        async with gateways[number].admit(one, job=detached_job(f"req-{number}", clock)):
            pass
        await heard()


async def test_a_request_waits_while_its_use_cannot_be_announced(
    clock: Clock,
) -> None:
    limits = Limits(
        bus := UnboundBus(MemoryBroker()), max_detached=3, clock=clock, retry_pause_s=0.0
    )
    async with bus, running_limits(limits, bus):
        await use(limits, key(requests_per_minute=10), 1, 1)
        bus.num_unroutable = 3

        num_used = await use(limits, key(requests_per_minute=10), 7, 5)

    assert (num_used, bus.num_unroutable) == (5, 0)


async def test_the_end_of_a_long_request_is_heard_though_its_announcement_fails(
    clock: Clock,
) -> None:
    one, bus = key(max_concurrent=1), UnboundBus(broker := MemoryBroker())
    async with AsyncExitStack() as stack:
        first = await opened_over(stack, bus, clock)
        second = await opened(stack, broker, clock, 1)
        async with first.admit(one, 10) as grant:
            grant.note_published()
            grant.settle(5)
            assert await use(second, one, 0, 0) == -1
            for _ in range(2):
                clock.now += 40
                first.listen()
                await heard()
            bus.num_unroutable = 1
        await heard()

        assert await use(second, one, 0, 0) == 0


async def test_a_gateway_that_begins_hears_of_detached_jobs_though_the_first_answer_fails(
    clock: Clock,
) -> None:
    one, bus = key(max_detached=1), UnboundBus(broker := MemoryBroker())
    async with AsyncExitStack() as stack:
        first = await opened_over(stack, bus, clock)
        async with first.admit(one, job=detached_job("req-0", clock)) as grant:
            grant.note_published()
        await heard()
        bus.num_unroutable = 1
        second = await opened(stack, broker, clock, 1)

        with pytest.raises(RateLimited):
            async with second.admit(one, job=detached_job("req-1", clock)):
                pass


async def test_the_headers_say_what_is_left(gateways: list[Limits], clock: Clock) -> None:
    one = key(requests_per_minute=10, tokens_per_minute=1000)
    assert dict(gateways[0].headers(one))[b"x-ratelimit-reset-tokens"] == b"0ms"

    await use(gateways[0], one, 30, 30)
    clock.now += 1

    assert dict(gateways[0].headers(one)) == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"9",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"970",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }


async def test_a_refusal_says_when_there_is_room(gateways: list[Limits], clock: Clock) -> None:
    one = key(tokens_per_minute=100)
    await use(gateways[0], one, 60, 60)
    clock.now += 20
    await use(gateways[1], one, 40, 40)

    with pytest.raises(RateLimited) as raised:
        async with gateways[2].admit(one, 50):
            pass

    assert raised.value.retry_after_s == 41
    clock.now += 41
    assert await use(gateways[2], one, 50, 50) == 50


@pytest.mark.parametrize(
    "field", ["requests_per_minute", "tokens_per_minute", "max_concurrent", "max_detached"]
)
async def test_a_refusal_names_the_field_of_the_key(
    gateways: list[Limits], clock: Clock, field: str
) -> None:
    one, (limits, *_) = key(**{field: 1}), gateways
    async with limits.admit(one, 1, detached_job("req-0", clock)):
        with pytest.raises(RateLimited) as raised:
            async with limits.admit(one, 1, detached_job("req-1", clock)):
                pass

    assert raised.value.limit == field


@pytest.mark.parametrize(
    ("limits", "size", "limit", "message"),
    [
        ({"requests_per_minute": 4}, 1, "tenant_requests_per_minute", "requests per minute"),
        ({"tokens_per_minute": 400}, 100, "tenant_tokens_per_minute", "tokens per minute"),
    ],
)
async def test_the_keys_of_a_tenant_share_its_limits_at_all_gateways(
    gateways: list[Limits], limits: dict[str, Any], size: int, limit: str, message: str
) -> None:
    first, second = keys_of(TenantLimits(**limits))
    for number in range(4):
        assert await use(gateways[number % 3], (first, second)[number % 2], size, size) == size
        await heard()

    for key in (first, second):
        with pytest.raises(RateLimited, match=f"{message} of the tenant alice: Limit 4") as caught:
            async with gateways[1].admit(key, size):
                pass
        assert caught.value.limit == limit
    bob = ApiKey("00cc", "bob", "", "", of_tenant=TenantLimits(**limits))
    assert await use(gateways[1], bob, size, size) == size


async def test_a_key_within_a_limited_tenant_keeps_its_own_limits(gateways: list[Limits]) -> None:
    first, second = keys_of(TenantLimits(requests_per_minute=9), own=1)
    await use(gateways[0], first, 1, 1)
    await heard()

    with pytest.raises(RateLimited, match="of this API key") as caught:
        async with gateways[1].admit(first):
            pass
    assert caught.value.limit == "requests_per_minute"
    assert await use(gateways[1], second, 1, 1) == 1


async def test_a_job_whose_client_has_left_runs_for_all_keys_of_its_tenant(
    gateways: list[Limits], clock: Clock
) -> None:
    first, second = keys_of(TenantLimits(max_concurrent=1))
    async with gateways[0].admit(first, 10, running_job("req-1", clock)) as grant:
        grant.note_published()
    await heard()

    with pytest.raises(RateLimited, match="concurrent requests of the tenant alice"):
        async with gateways[1].admit(second):
            pass
    gateways[1].hear(Ended(request_id="req-1", num_tokens=5))
    assert await use(gateways[1], second, 1, 1) == 1


async def test_the_headers_are_about_the_limit_with_the_least_left(gateways: list[Limits]) -> None:
    first, second = keys_of(TenantLimits(requests_per_minute=5), own=3)
    for _ in range(3):
        await use(gateways[0], second, 1, 1)

    of_first, of_second = (dict(gateways[0].headers(key)) for key in (first, second))

    assert of_first[b"x-ratelimit-limit-requests"] == b"5"
    assert of_second[b"x-ratelimit-remaining-requests"] == b"2"


async def test_detached_requests_have_the_limit_of_the_tenant_unless_the_key_says_otherwise(
    gateways: list[Limits], clock: Clock
) -> None:
    first, second = keys_of(TenantLimits(max_detached=1))
    async with gateways[0].admit(first, 0, detached_job("req-1", clock)) as grant:
        grant.note_published()
    await heard()

    with pytest.raises(RateLimited, match="Limit 1, Used 1"):
        async with gateways[1].admit(second, 0, detached_job("req-2", clock)):
            pass


async def test_a_cancelled_request_leaves_nothing(gateways: list[Limits]) -> None:
    one = key(max_concurrent=1)
    for _ in range(30):
        asking = asyncio.create_task(use(gateways[0], one, 0, 0))
        for _ in range(random.Random(1).randrange(30)):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    await heard()
    assert await use(gateways[1], one, 0, 0) == 0


async def test_a_claim_that_is_decided_as_its_patience_ends_is_admitted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = key(max_concurrent=1)
    async with DeafBus() as bus, running_limits(Limits(bus, 1, clock), bus) as limits:
        assert await use(limits, one, 0, 0) == 0
        await heard()
        bus.is_deaf = True
        asking = asyncio.create_task(use(limits, one, 0, 0))
        await heard()

        # The next turn of the event loop decides the claim, and then finds that its time is over.
        loop = asyncio.get_running_loop()
        loop.call_soon(limits.hear, UsageReport(gateway=limits.name, number=99))
        over = loop.time() + 6
        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda: over)
            used = await asking

        use_now = limits.use_of(one)
        assert used == 0
        assert use_now is not None
        assert use_now.num_running == 0


async def test_facts_survive_their_encoding(gateways: list[Limits]) -> None:
    ended = Ended(request_id="req-0", num_tokens=3)

    assert decode_usage(encode(ended)) == ended
