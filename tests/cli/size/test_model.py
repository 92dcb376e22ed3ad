"""How many processes a load takes."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cli.size import model
from cli.size.costs import Cost, Costs, Demand, Measured
from cli.size.model import MAX_NODES, Load, Machines, Size, paced_tokens_per_event, size
from worker.decode import bridge

COST = Cost(
    per_process=0.01,
    per_pair=1e-5,
    per_request=0.003,
    per_event=0.0002,
    per_wakeup=0.0002,
    most_wakeups_per_s=300,
)
COSTS = Costs(
    about={},
    worker=COST,
    gateway=COST,
    broker=COST,
    cluster=structs.replace(COST, per_request=0.007, per_event=0.0003),
    per_present_queue=1e-8,
    per_job=0.0005,
    stream_bytes={"worker": 8e3, "broker": 4e4, "gateway": 7e4},
    process_bytes={"worker": 1.5e8, "broker": 1.3e8, "gateway": 1.2e8},
    stream_erlang_processes=6.0,
    measured=Measured(num_workers=32, num_streams=10_000, requests_per_s=60, events_per_s=2500),
)
MACHINES = Machines(
    worker_tokens_per_s=1000,
    worker_streams=64,
    node_cores=8,
    node_bytes=1.6e10,
    gateway_streams=1024,
)
FEW = Load(num_streams=10, requests_per_s=1, tokens_per_s=200)

numbers = st.floats(0, 2_000_000)
loads = st.builds(
    Load, num_streams=numbers, requests_per_s=numbers, tokens_per_s=numbers.map(lambda n: 20 * n)
)
machines = st.builds(
    Machines,
    worker_tokens_per_s=st.floats(10, 1e5),
    worker_streams=st.floats(1, 1024),
    node_cores=st.floats(1, 128),
    node_bytes=st.floats(1e9, 1e12),
    gateway_streams=st.floats(10, 1e4),
    core_speed=st.floats(0.25, 4),
)


def names(of: type[Load | Machines]) -> st.SearchStrategy[str]:
    return st.sampled_from([field.name for field in fields(of)])


def counts(found: Size) -> tuple[int, ...]:
    return (found.num_deployments, found.num_nodes, found.num_gateways, found.num_workers)


@given(load=loads, of=machines, factor=st.floats(1, 100), name=names(Load))
def test_more_load_never_needs_less(load: Load, of: Machines, factor: float, name: str) -> None:
    largest = {name: getattr(load, name) * factor}
    # Fewer tokens in an event are more events.
    less, more = (load, largest) if name != "tokens_per_event" else (replace(load, **largest), {})

    found = size(replace(load, **more), of, COSTS)

    pairs = zip(counts(size(less, of, COSTS)), counts(found), strict=True)
    assert all(before <= after for before, after in pairs)


@given(load=loads, of=machines, factor=st.floats(1, 10), name=names(Machines))
def test_larger_machines_never_need_more(
    load: Load, of: Machines, factor: float, name: str
) -> None:
    larger = replace(of, **{name: getattr(of, name) * factor})

    found = size(load, larger, COSTS)

    pairs = zip(counts(size(load, of, COSTS)), counts(found), strict=True)
    assert all(before >= after for before, after in pairs)


@given(load=loads, of=machines)
def test_no_limit_is_exceeded_and_every_process_has_its_share(load: Load, of: Machines) -> None:
    found = size(load, of, COSTS)

    assert all(limit.used <= 1 for limit in found.limits)
    assert found.limits[0].used == max(limit.used for limit in found.limits)
    assert found.num_workers * of.worker_tokens_per_s >= load.tokens_per_s
    assert found.num_workers * of.worker_streams >= load.num_streams
    assert found.num_gateways * of.gateway_streams >= load.num_streams
    assert found.num_nodes <= MAX_NODES * found.num_deployments


def test_a_small_load_takes_one_node_two_gateways_and_a_spare_worker() -> None:
    assert counts(size(FEW, MACHINES, COSTS)) == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"tokens_per_s": 8000.0}, "CPU of the broker"),
        ({"requests_per_s": 100.0}, "Raft commits"),
        ({"num_streams": 1e5}, "channels and queues"),
    ],
)
def test_the_next_limit_depends_on_the_load(changes: dict[str, float], first: str) -> None:
    roomy = replace(MACHINES, node_bytes=1e12, worker_streams=1e5)

    found = size(replace(FEW, **changes), roomy, COSTS)

    assert found.limits[0].name.startswith(first)


def test_little_memory_is_a_limit() -> None:
    found = size(replace(FEW, num_streams=5000), replace(MACHINES, node_bytes=1e9), COSTS)

    assert found.limits[0].name == "memory of a node"


def test_several_deployments_divide_what_one_cannot_take() -> None:
    load = Load(num_streams=1e6, requests_per_s=4e4, tokens_per_s=2e7)

    found = size(load, MACHINES, COSTS)
    half = size(
        replace(load, num_streams=5e5, requests_per_s=2e4, tokens_per_s=1e7), MACHINES, COSTS
    )

    assert found.num_nodes == MAX_NODES * found.num_deployments
    assert found.num_deployments == pytest.approx(2 * half.num_deployments, abs=2)


def test_the_cores_are_those_of_the_costs() -> None:
    found = size(FEW, MACHINES, COSTS)

    work = Demand(num_processes=2, num_pairs=4, requests_per_s=1, events_per_s=200)
    assert found.gateway_cores == pytest.approx(COST.cores(work))
    # 150 wake-ups, because a third of 600 is as long as 200.
    assert COST.cores(work) == pytest.approx(0.02 + 0.00004 + 0.003 + 0.04 + 0.03)


@given(load=loads, of=machines)
def test_no_gateway_is_loaded_beyond_its_share_and_there_is_no_gateway_more(
    load: Load, of: Machines
) -> None:
    found = size(load, of, COSTS)

    share = (model.UTILIZATION - model.ANNOUNCEMENT_SHARE) * of.core_speed

    def is_enough(num_gateways: int) -> bool:
        work = Demand(
            num_processes=num_gateways,
            requests_per_s=load.requests_per_s,
            events_per_s=load.events_per_s,
        )
        is_fast = COST.cores(work) <= num_gateways * share
        return is_fast and num_gateways >= max(2, load.num_streams / of.gateway_streams)

    assert is_enough(found.num_gateways)
    assert not is_enough(found.num_gateways - 1)


def test_events_that_arrive_together_cost_less() -> None:
    def cores(events_per_s: float) -> float:
        return COST.cores(Demand(num_processes=1, events_per_s=events_per_s)) - COST.per_process

    assert cores(10) == pytest.approx(10 * (COST.per_event + COST.per_wakeup), rel=0.02)
    assert cores(1e6) == pytest.approx(1e6 * COST.per_event, rel=0.02)


@pytest.mark.parametrize(
    ("tokens_per_request", "tokens_per_s", "num_events"),
    [(300, 20, 155), (300, 10, 300), (300, 5, 300), (300, 100, 39), (8, 100, 8)],
)
def test_a_stream_has_the_events_of_its_pace(
    tokens_per_request: float, tokens_per_s: float, num_events: float
) -> None:
    tokens_per_event = paced_tokens_per_event(tokens_per_request, tokens_per_s)

    assert tokens_per_request / tokens_per_event == pytest.approx(num_events)


def test_an_answer_begins_with_as_many_events_as_the_worker_sends_at_once() -> None:
    assert model.TOKENS_AT_ONCE == bridge.NUM_AT_ONCE
