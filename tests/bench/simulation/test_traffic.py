"""The requests of a simulated day, and what a step costs."""

import json

import numpy as np
import pytest

from bench.simulation.spec import MEASURED, Prices
from bench.simulation.traffic import DAY_S, Arrivals, Flood, Lengths, Tenant, Traffic
from worker.engine.step_cost import StepWork

STEADY = Tenant("steady", share=1.0)
FLOODING = Tenant("flooding", floods=(Flood(1, 2, 0.5),))


def read(traffic: Traffic, *until: float) -> Arrivals:
    return Arrivals.joined([traffic.until(end) for end in until])


def is_equal(one: Arrivals, other: Arrivals) -> bool:
    columns = ("at", "tenant", "prompt", "answer")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def test_a_seed_draws_the_same_requests_however_they_are_read() -> None:
    at_once = read(Traffic([STEADY, FLOODING], 2.0, seed=3, capacity_per_s=4), 7200)
    in_parts = read(
        Traffic([STEADY, FLOODING], 2.0, seed=3, capacity_per_s=4), 0.5, 100, 101, 3000, 7200
    )
    of_another = read(Traffic([STEADY, FLOODING], 2.0, seed=4, capacity_per_s=4), 7200)

    assert len(at_once) > 1000
    assert is_equal(at_once, in_parts)
    assert not is_equal(at_once, of_another)


def test_requests_come_in_order_and_most_of_them_in_the_afternoon() -> None:
    arrivals = read(Traffic([STEADY], 0.5, seed=1), DAY_S)

    assert np.all(np.diff(arrivals.at) >= 0)
    hours = np.histogram(arrivals.at, bins=24, range=(0, DAY_S))[0]
    assert hours[12:18].sum() > 2 * hours[0:6].sum()
    assert len(arrivals) / DAY_S == pytest.approx(0.5, rel=0.3)


def test_a_flood_lasts_from_its_first_hour_to_its_last() -> None:
    arrivals = read(Traffic([STEADY, FLOODING], 0.0, seed=1, capacity_per_s=4), DAY_S)

    assert set(arrivals.tenant) == {1}
    assert len(arrivals) == pytest.approx(0.5 * 4 * 3600, rel=0.1)
    assert 3600 <= arrivals.at[0] < arrivals.at[-1] < 7200


def test_lengths_have_their_mean_and_stay_within_bounds() -> None:
    drawn = Lengths(220, largest=2000).draw(np.random.default_rng(1), 50_000)

    assert drawn.mean() == pytest.approx(220, rel=0.03)
    assert (drawn.min(), drawn.max()) >= (1, 1)
    assert drawn.max() <= 2000


@pytest.mark.parametrize("weights", ["bfloat16", "q4_1"])
def test_steps_cost_what_was_measured(weights: str) -> None:
    prices = Prices.measured(weights)
    steps = [row for row in json.loads(MEASURED.read_text())["steps"] if row["weights"] == weights]

    errors = []
    for row in steps:
        work = StepWork()
        for _ in range(row["num_seqs"]):
            work.add(row["context"], row["num_new_tokens"])
        errors.append(abs(1e3 * prices.seconds(work) / row["step_ms"] - 1))

    assert len(errors) > 10
    assert max(errors) < 0.25
    assert np.mean(errors) < 0.1


def test_weights_that_nobody_measured_are_an_error() -> None:
    with pytest.raises(ValueError, match="float8"):
        Prices.measured("float8")
