"""Pictures are small, and show what was measured."""

import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from bench.plots import compact, label_axis, new_figure, save, visible

_CURVE = [(x / 4, 100 * math.exp(-x / 400)) for x in range(1200)]


def test_a_curve_keeps_the_points_that_can_be_seen() -> None:
    kept = visible([*_CURVE, (301.0, 90.0), (302.0, 5.0)])

    assert len(kept) < 30
    assert {_CURVE[0], (301.0, 90.0), (302.0, 5.0)} <= set(kept)
    assert all(_distance_below(kept, point) < 0.5 for point in _CURVE)


def test_a_curve_that_returns_to_its_start_keeps_its_turn() -> None:
    assert visible([(0.0, 0.0), (5.0, 0.0), (10.0, 0.0), (5.0, 0.0), (0.0, 0.0)]) == [
        (0.0, 0.0),
        (10.0, 0.0),
        (0.0, 0.0),
    ]


def test_a_picture_is_small_and_names_its_axes(tmp_path: Path) -> None:
    figure, [axis] = new_figure(1)
    axis.plot(*zip(*_CURVE, strict=True), label="a system")
    axis.legend()
    label_axis(axis, "seconds", "tokens")
    save(figure, tmp_path / "new" / "picture.svg")

    text = (tmp_path / "new" / "picture.svg").read_text()

    assert len(text) < 12_000
    assert {"seconds", "tokens", "a system"} <= {
        element.text for element in ElementTree.fromstring(text).iter()
    }
    assert not re.search(r"\d\.\d{2}", text)
    assert compact(text) == text


def _distance_below(line: list[tuple[float, float]], point: tuple[float, float]) -> float:
    """How far a line is above or below a point."""
    for (left, low), (right, high) in pairwise(line):
        if left <= point[0] <= right:
            share = (point[0] - left) / (right - left)
            return abs(low + share * (high - low) - point[1])
    return math.inf
