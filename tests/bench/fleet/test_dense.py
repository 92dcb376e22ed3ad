"""Loads with many streams, and with many workers, in miniature, with real processes."""

from collections.abc import Iterator

import pytest

from bench.fleet.announcements import measure_beside
from bench.fleet.dense import DensePlan, Layout, measure_loads
from bench.fleet.deployment import Deployment, deployed
from bench.fleet.point import NOTHING
from bench.fleet.steady import measure_steady
from cli.size.costs import ROLES

pytestmark = pytest.mark.rabbit

PLAN = DensePlan(layouts=[], answer_tokens=60, short_tokens=4, step_s=0.02, seconds=0.1)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed(num_nodes=1, num_gateways=1) as deployment:
        deployment.add_workers(1, step_s=PLAN.step_s, num_slots=8, is_paced=True)
        yield deployment


async def test_paced_streams_have_fewer_events_than_tokens(deployment: Deployment) -> None:
    idle, long, short = await measure_loads(PLAN, deployment, num_streams=[4])

    assert idle.received == NOTHING
    assert (long.num_gateways, long.num_workers, long.answer_tokens) == (1, 1, 60)
    assert 0 < long.received.events_per_s < 0.8 * long.received.tokens_per_s
    assert short.received.requests_per_s > 0
    assert all(long.wakeups_per_s[role] > 0 for role in ROLES)


async def test_streams_without_an_end_have_events_and_no_requests() -> None:
    layout = Layout(num_nodes=1, num_gateways=1, num_workers=1, num_streams=[4])

    [point] = (await measure_steady([layout], seconds=0.5)).points

    assert point.received.events_per_s > 0
    assert point.received.tokens_per_s >= point.received.events_per_s
    assert point.received.requests_per_s == 0


async def test_other_workers_are_announced(deployment: Deployment) -> None:
    point = await measure_beside(deployment, 5, seconds=0.1, settle_s=0.0)

    assert point.num_workers == 6
    assert point.received.events_per_s == 0
