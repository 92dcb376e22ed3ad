"""The file with the results of all parts, and the costs that follow from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.fleet.curve import Curve, Point
from bench.fleet.fit import costs_of
from bench.fleet.neighbour import Neighbour
from bench.fleet.queues import Queues
from bench.fleet.slow_streams import SlowStreams
from cli.size.costs import Costs

_FULL = 0.9
"""The share of the machine's cores above which the machine is full."""

PARTS: Mapping[str, type[Any]] = {
    "curve": Curve,
    "cluster": Curve,
    "streams": SlowStreams,
    "queues": Queues,
    "neighbour": Neighbour,
}
_COSTS = ("curve", "cluster", "streams", "queues")
"""The parts from which the costs follow."""


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
        """All points of the curves that were measured."""
        parts = [part for part in ("curve", "cluster") if self.has(part)]
        return [point for part in parts for point in self.part(part).points]

    def costs(self) -> Costs | None:
        """The costs, if all parts were measured from which they follow."""
        if not all(map(self.has, _COSTS)):
            return None
        about = self._content["curve"]["about"]
        curve, cluster, streams, queues = map(self.part, _COSTS)
        return costs_of(about, curve.points, cluster.points, queues, streams)


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
