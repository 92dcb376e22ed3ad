"""KEDA and the HPA, with the ScaledObject of the Helm chart."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from bench.simulation.__main__ import scaled_object, scrape_interval_s
from bench.simulation.autoscaler import Autoscaler, Demand, Policy, Rules, ScaledObject
from bench.simulation.coarse import CoarseFleet
from bench.simulation.play import play
from bench.simulation.report import row_of
from bench.simulation.spec import Prices, Spec
from bench.simulation.traffic import Flood, Tenant, Traffic
from tests.support.deployment.helm import find, render

SPEC = Spec(prices=Prices.measured("bfloat16"))
SCALED = ScaledObject(
    min_replicas=0,
    max_replicas=100,
    threshold=10,
    activation_threshold=0,
    polling_s=30,
    cooldown_s=300,
    up=Rules(0, (Policy("Percent", 100, 15), Policy("Pods", 4, 15))),
    down=Rules(300, (Policy("Percent", 100, 15),)),
)


@pytest.fixture(scope="module")
def shipped() -> ScaledObject:
    return scaled_object(0, 30, {})


def sizes(
    scaled: ScaledObject, demand: Iterator[float], size: int, seconds: float
) -> dict[float, int]:
    """The size of a pool at each time at which it changes. ``demand`` is asked at each scrape."""
    autoscaler = Autoscaler(scaled, scrape_s=15)
    changes = {}
    for now in range(int(seconds)):
        wanted = autoscaler.act(now, lambda: next(demand), size)
        if wanted != size:
            changes[float(now)] = size = wanted
    return changes


def forever(value: float) -> Iterator[float]:
    while True:
        yield value


def test_the_simulated_demand_is_what_the_chart_asks_prometheus_for() -> None:
    pool = {"model": "smollm2", "autoscaling": {"enabled": True}}
    manifest = find(render({"workers": {"pool": pool}}), "ScaledObject", "warren-worker-pool")
    (trigger,) = manifest["spec"]["triggers"]

    asked = set(re.findall(r"warren_\w+", trigger["metadata"]["query"]))
    assert asked == {field.name for field in fields(Demand)}


def test_what_the_chart_says_is_simulated(shipped: ScaledObject) -> None:
    assert (shipped.min_replicas, shipped.max_replicas) == (0, 30)
    assert (shipped.threshold, shipped.cooldown_s, shipped.polling_s) == (6, 300, 30)
    assert shipped.down == Rules(900, (Policy("Percent", 10, 60),))
    assert shipped.up == SCALED.up
    assert scrape_interval_s() == 15


@pytest.mark.parametrize(
    "values", [{"selectPolicy": "Min"}, {"tolerance": 0.2}], ids=["the least change", "a tolerance"]
)
def test_what_is_not_simulated_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not simulated"):
        SCALED.up.overridden(values)


def test_a_pool_doubles_or_grows_by_four_every_quarter_of_a_minute() -> None:
    changes = sizes(SCALED, forever(995), size=0, seconds=120)

    # KEDA starts the first worker, and the HPA continues at once.
    assert list(changes.values()) == [5, 10, 20, 40, 80, 100]
    assert list(changes) == [0, 15, 30, 45, 60, 75]


def test_a_demand_within_the_tolerance_changes_nothing() -> None:
    assert sizes(SCALED, forever(109), size=10, seconds=1000) == {}
    assert list(sizes(SCALED, forever(111), size=10, seconds=1000).values()) == [12]


def test_a_pool_shrinks_when_nothing_spoke_against_it_for_five_minutes() -> None:
    def dip() -> Iterator[float]:
        yield from [500.0] * 4
        yield from [20.0] * 10
        yield from [300.0] * 2
        yield from forever(20.0)

    changes = sizes(SCALED, dip(), size=50, seconds=1200)

    # The size of the smaller peak remains until that, too, is five minutes ago.
    assert list(changes.values()) == [30, 2]
    assert list(changes) == [45 + 300, (4 + 10 + 1) * 15 + 300]


def test_a_policy_limits_how_fast_a_pool_shrinks() -> None:
    slowly = replace(SCALED, down=Rules(0, (Policy("Percent", 10, 60),)))

    changes = sizes(slowly, forever(10), size=50, seconds=200)

    assert changes == {0: 45, 60: 40, 120: 36, 180: 32}


def test_an_idle_pool_stops_after_its_cooldown_and_starts_at_the_next_poll() -> None:
    def pause() -> Iterator[float]:
        yield from [10.0] * 4
        yield from [0.0] * 40
        yield from forever(10.0)

    changes = sizes(SCALED, pause(), size=1, seconds=1200)

    assert list(changes.values()) == [0, 1]
    stopped, started = changes
    assert 30 + 300 < stopped <= 60 + 300
    assert 44 * 15 <= started <= 44 * 15 + 30


@pytest.mark.parametrize("seed", range(2))
def test_a_burst_takes_a_pool_from_nothing_and_back_without_a_failure(
    shipped: ScaledObject, seed: int
) -> None:
    tenant = Tenant("bursty", floods=(Flood(0.01, 0.16, 1.0),))
    traffic = Traffic([tenant], 0.0, seed, capacity_per_s=8)
    fleet = CoarseFleet(SPEC, traffic.tenants, 0, 30)

    books = play(fleet, traffic, 1800, Autoscaler(shipped, scrape_interval_s()))

    assert books.arrived.sum() > 4000
    assert books.answered.sum() == books.arrived.sum()
    assert (books.num_failed, fleet.is_idle) == (0, True)
    assert max(books.sizes.workers) >= 8
    assert (books.sizes.workers[0], books.sizes.workers[-1]) == (0, 0)
    assert books.sizes.num_turns <= 3
    assert row_of("", books)["ttft_p50_s"] < 30
