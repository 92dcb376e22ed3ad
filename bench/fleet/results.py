"""The file with the results of all parts, and the costs that follow from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.fleet.announcements import Announcements
from bench.fleet.curve import Curve
from bench.fleet.dense import DenseFleet
from bench.fleet.fit import costs_of, left_out
from bench.fleet.neighbour import Neighbour
from bench.fleet.point import Point
from bench.fleet.queues import Queues
from bench.fleet.slow_streams import SlowStreams
from bench.fleet.steady import Steady
from cli.size.costs import Costs

_FULL = 0.9
"""The share of the machine's cores above which the machine is full."""

PARTS: Mapping[str, type[Any]] = {
    "curve": Curve,
    "dense": DenseFleet,
    "steady": Steady,
    "announcements": Announcements,
    "streams": SlowStreams,
    "queues": Queues,
    "neighbour": Neighbour,
}
_COSTS = ("curve", "dense", "steady", "announcements", "streams", "queues")
"""The parts from which the costs follow."""
_POINTS = ("curve", "dense", "steady")


class Results:
    """The parts that were measured, each with its date, commit and machine."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = dict(content)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """The results in a file; none if it does not exist."""
        return cls(json.loads(path.read_text()) if path.exists() else {})

    def add(self, part: str, about: dict[str, Any], result: Any) -> None:
        """Replace a part."""
        self._content[part] = {"about": about, **asdict(result)}

    def write(self, path: Path) -> None:
        report.write_json(path, {part: self._content[part] for part in PARTS if self.has(part)})

    def has(self, part: str) -> bool:
        return part in self._content

    def part(self, part: str) -> Any:
        """An object of the part's class."""
        return msgspec.convert(self._content[part], PARTS[part])

    @property
    def points(self) -> Sequence[Point]:
        """All loads from which the costs of requests and events follow."""
        return [point for part in _POINTS for point in self.part(part).points]

    def costs(self) -> Costs | None:
        """The costs, if all parts were measured from which they follow."""
        if not all(map(self.has, _COSTS)):
            return None
        about = self._content["dense"]["about"]
        announced = self.part("announcements").points
        queues, streams = self.part("queues"), self.part("streams")
        return costs_of(about, self.points, announced, queues, streams)

    def errors(self) -> Sequence[float]:
        """The relative errors of `left_out`."""
        return left_out(self.points, self.part("announcements").points)


def write_costs(path: Path, costs: Costs) -> None:
    report.write_json(path, msgspec.to_builtins(costs))


def of_curve(curve: Curve) -> Sequence[Point]:
    """The loads that differ only in the number of workers."""
    first, *others = (point for point in curve.points if point.answer_tokens)
    found = [first]
    for point in others:
        if point.num_workers > found[-1].num_workers:
            found.append(point)
    return found


def first_full(curve: Curve, num_cores: int) -> Point | None:
    """The load of the curve from which on the cores of the machine are full; None if none fills
    them."""
    full = (point for point in of_curve(curve) if sum(point.cores.values()) > _FULL * num_cores)
    return next(full, None)


def of_linear(point: Point, first: Point) -> float:
    """The throughput, relative to that of the first point for each worker."""
    linear = first.received.tokens_per_s / first.num_workers * point.num_workers
    return point.received.tokens_per_s / linear
