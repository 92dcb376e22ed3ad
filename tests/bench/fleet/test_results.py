"""The results that are committed, and the costs that follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.announcements import Announcements
from bench.fleet.curve import Curve
from bench.fleet.dense import DenseFleet
from bench.fleet.results import Results, first_full, of_curve, of_linear
from bench.fleet.steady import Steady
from tests.bench.fleet.loads import STREAMS, TRUE, announced, points, queues

FILE = Path(__file__).parents[3] / "bench" / "results" / "fleet.json"
COMMITTED = Results.read(FILE)
ABOUT = {"date": "2026-11-25T00:40:00+00:00", "machine": {"cores": 2, "cpu": "a CPU"}}


def results() -> Results:
    found = Results({})
    found.add("curve", ABOUT, Curve(points=points(TRUE), joined_s=[0.1], num_left=1))
    found.add("dense", ABOUT, DenseFleet(points=[*points(TRUE), *points(TRUE, 3)]))
    found.add("steady", ABOUT, Steady(points=points(TRUE)))
    found.add("announcements", ABOUT, Announcements(points=announced(TRUE)))
    found.add("streams", ABOUT, STREAMS)
    return found


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = results()
    found.write(tmp_path / "fleet.json")

    read = Results.read(tmp_path / "fleet.json")
    read.write(tmp_path / "again.json")

    assert len(read.points) == len(found.points)
    assert read.part("streams") == STREAMS
    assert (tmp_path / "again.json").read_text() == (tmp_path / "fleet.json").read_text()


def test_a_part_replaces_its_earlier_results() -> None:
    found = results()
    found.add("streams", ABOUT, replace(STREAMS, num_streams=5))

    assert found.part("streams").num_streams == 5
    assert len(found.points) == len(results().points)


def test_costs_need_all_parts() -> None:
    found = results()
    assert found.costs() is None

    found.add("queues", ABOUT, queues(0.002, 0.003))

    costs = found.costs()
    assert costs is not None
    assert costs.about == ABOUT
    assert costs.broker.per_request == pytest.approx(TRUE["broker"].per_request)


def test_throughput_is_compared_with_that_of_the_first_point() -> None:
    first, other = points(TRUE)[1], points(TRUE)[6]
    slower = replace(other, received=replace(other.received, tokens_per_s=20.0))

    assert of_linear(other, first) == pytest.approx(1)
    assert of_linear(slower, first) == pytest.approx(0.5)


def test_the_curve_has_one_load_for_each_number_of_workers() -> None:
    curve = Curve(points=points(TRUE), joined_s=[], num_left=0)

    assert [point.num_workers for point in of_curve(curve)] == [1, 4, 16]


def test_the_machine_is_full_from_the_load_that_uses_nine_tenths_of_its_cores() -> None:
    largest = [point for point in points(TRUE) if point.answer_tokens == 200]
    curve = Curve(points=largest, joined_s=[], num_left=0)
    most = sum(of_curve(curve)[-1].cores.values())

    full = first_full(curve, num_cores=3)

    assert most > 0.9 * 3
    assert full is not None
    assert full.num_workers == 16
    assert first_full(curve, num_cores=8) is None
