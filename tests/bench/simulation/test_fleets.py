"""Both fidelities of a fleet: they agree, they repeat themselves, and they lose no request."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from bench.simulation.books import Books
from bench.simulation.coarse import CoarseFleet
from bench.simulation.conversations import Conversations, hold
from bench.simulation.exact import ExactFleet
from bench.simulation.play import Fleet, play
from bench.simulation.report import row_of, samples
from bench.simulation.spec import Prices, Spec
from bench.simulation.traffic import (
    TENANTS,
    Flood,
    Lengths,
    Talk,
    Tenant,
    Traffic,
    capacity_per_s,
)

SPEC = Spec(prices=Prices.measured("bfloat16"))
STEADY = TENANTS[:3]
NewFleet = Callable[[Spec, Sequence[Tenant], int], AbstractContextManager[Fleet]]


def coarse(
    spec: Spec, tenants: Sequence[Tenant], num_workers: int
) -> AbstractContextManager[Fleet]:
    return nullcontext(CoarseFleet(spec, tenants, num_workers, max(num_workers, 4)))


@pytest.fixture(params=[coarse, ExactFleet], ids=["coarse", "exact"])
def new_fleet(request: pytest.FixtureRequest) -> NewFleet:
    chosen: NewFleet = request.param
    return chosen


def steady(new_fleet: NewFleet, load: float, seed: int, seconds: float = 100) -> Books:
    """Four workers with a mean of ``load`` requests for each that they can answer."""
    capacity = 4 * capacity_per_s(SPEC, STEADY)
    with new_fleet(SPEC, STEADY, 4) as fleet:
        return play(fleet, Traffic(STEADY, load * capacity, seed), seconds)


@pytest.mark.parametrize(("load", "seed"), [(0.5, 2), (1.2, 1), (1.5, 3)])
def test_both_fidelities_agree(load: float, seed: int) -> None:
    exact = steady(ExactFleet, load, seed)
    rough = steady(coarse, load, seed)

    assert rough.arrived.tolist() == exact.arrived.tolist()
    assert rough.utilisation == pytest.approx(exact.utilisation, rel=0.15)
    assert rough.num_sequences == pytest.approx(exact.num_sequences, rel=0.15)
    assert rough.ttft_s(50) == pytest.approx(exact.ttft_s(50), rel=0.15)


def test_a_seed_gives_the_same_report(new_fleet: NewFleet) -> None:
    one, same = (steady(new_fleet, 0.8, 5, seconds=40) for _ in range(2))
    other = steady(new_fleet, 0.8, 6, seconds=40)

    assert row_of("", one) == row_of("", same)
    assert samples(one, 60) == samples(same, 60)
    assert row_of("", one) != row_of("", other)


def test_requests_are_refused_or_late_or_answered_but_never_lost(new_fleet: NewFleet) -> None:
    spec = Spec(prices=SPEC.prices, max_queue_wait_s=20, request_timeout_s=60)
    tenant = Tenant("flooding", floods=(Flood(0, 150 / 3600, 1.0),))
    with new_fleet(spec, [tenant], 1) as fleet:
        books = play(fleet, Traffic([tenant], 0, 1, capacity_per_s=4), 240)
        is_idle = fleet.is_idle

    assert is_idle
    assert books.refused.sum() > 20
    assert books.answered.sum() > 50
    ended = books.answered.sum() + books.refused.sum() + books.late.sum()
    assert ended == books.arrived.sum()


def test_a_worker_that_stops_hands_its_sequences_over(new_fleet: NewFleet) -> None:
    spec = Spec(prices=SPEC.prices, drain_grace_s=2)
    tenant = Tenant("long", answer=Lengths(400, sigma=0.1), floods=(Flood(0, 20 / 3600, 1.0),))
    traffic = Traffic([tenant], 0, 1, capacity_per_s=1)
    with new_fleet(spec, [tenant], 2) as fleet:
        play(fleet, traffic, 20)
        fleet.resize(1)
        for second in range(21, 200):
            fleet.advance(second, traffic.until(second))
        books, num_ready = fleet.books, fleet.num_ready

    assert num_ready == 1
    assert books.handed_over.sum() > 0
    assert books.answered.sum() == books.arrived.sum() > 10


def test_a_worker_takes_jobs_once_it_has_started(new_fleet: NewFleet) -> None:
    spec = Spec(prices=SPEC.prices, start_s=30)
    tenant = Tenant("early", answer=Lengths(20), floods=(Flood(0, 10 / 3600, 1.0),))
    with new_fleet(spec, [tenant], 0) as fleet:
        fleet.resize(1)
        books = play(fleet, Traffic([tenant], 0, 1, capacity_per_s=1), 90)

    assert books.answered.sum() == books.arrived.sum() > 3
    assert 20 < books.ttft_s(50) < 40


@pytest.fixture
def competing() -> Sequence[Tenant]:
    floods = (Flood(0, 1, 1.0),)
    return (
        Tenant("light", floods=floods),
        Tenant("heavy", weight=3.0, floods=floods),
        Tenant("single", share=1.0, answer=Lengths(20)),
    )


def test_floods_share_by_weight_and_delay_no_one_else(competing: Sequence[Tenant]) -> None:
    traffic = Traffic(competing, 0.4, 1, capacity_per_s=8)
    books = play(CoarseFleet(SPEC, competing, 4, 4), traffic, 600)

    assert books.fairness > 0.98
    assert books.refused[2] == 0
    assert books.ttft_s(50, 2) < books.ttft_s(50, 0) / 5


@pytest.fixture(scope="module")
def talks() -> Conversations:
    return Conversations(
        count=32,
        num_turns=6,
        pause_s=3.0,
        first_tokens=2000,
        question_tokens=20,
        answer_tokens=32,
    )


def conversing(*, has_affinity: bool) -> Spec:
    return Spec(
        prices=Prices(0.02, 0, 0, 0, 0),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_step_s=10.0,
        num_blocks=2048,
        has_affinity=has_affinity,
    )


def test_conversations_find_their_caches_as_in_a_real_fleet(talks: Conversations) -> None:
    near = hold(conversing(has_affinity=True), talks, num_workers=4, seed=1)
    shared = hold(conversing(has_affinity=False), talks, num_workers=4, seed=1)

    assert near.hit_rate > 0.85
    assert shared.hit_rate < 0.6
    assert near.later_ttft_s(50) < shared.later_ttft_s(50) / 4


def test_conversations_lose_no_turn_when_a_favourite_stops(talks: Conversations) -> None:
    spec = conversing(has_affinity=True)
    tenant = Tenant("users", answer=Lengths(32), talk=Talk(6, 2.0, Lengths(20)))
    first = Traffic([dataclasses.replace(tenant, share=1.0)], 4, 1, end_s=10)
    with ExactFleet(spec, first.tenants, 4) as fleet:
        play(fleet, first, 12)
        fleet.resize(3)
        for second in range(13, 200):
            fleet.advance(second, first.until(second))
        books = fleet.books

    assert books.answered.sum() == books.arrived.sum() > 50
