"""Plots figures as small SVG files."""

import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import Row

mpl.rcParams["svg.hashsalt"] = "warren"  # equal figures produce equal files
mpl.rcParams["font.sans-serif"] = ["DejaVu Sans"]
mpl.rcParams["svg.fonttype"] = "none"  # a tenth of the size of outlines
_INCHES = (5.0, 3.6)
_TOLERANCE_PT = 0.2
"""How far a curve may be from its points. Lines are at least 0.8 points wide."""
_POLYLINE = re.compile(r'(?<= d=")M ([-\d. \nL]+)(?=")')

Panel = tuple[str, Callable[[Row], float]]
"""The label of an axis, and where its values come from."""


def draw_rows(path: Path, rows: Sequence[Row], panels: Sequence[Panel]) -> None:
    """Panels side by side, each over the number of users. Our systems are drawn bold."""
    figure, axes = new_figure(len(panels))
    for axis, (label, value) in zip(axes, panels, strict=True):
        for (system, weights), line in _lines(rows).items():
            axis.plot(
                [row.num_users for row in line],
                [value(row) for row in line],
                marker="o",
                linewidth=1.2 if line[0].is_peer else 2.4,
                linestyle="--" if line[0].is_peer else "-",
                label=f"{system}, {weights}",
            )
        users = sorted({row.num_users for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(users, [str(number) for number in users])
        label_axis(axis, "concurrent users", label)
    axes[0].legend(fontsize="small")
    save(figure, path)


def new_figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    """A picture with panels side by side."""
    figure = Figure(figsize=(_INCHES[0] * num_panels, _INCHES[1]), layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def label_axis(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def save(figure: Figure, path: Path) -> None:
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(drawn.getvalue()), encoding="utf-8")


def compact(svg: str) -> str:
    """The same picture in about half of the bytes: without metadata, names of groups and white
    space, with coordinates of one decimal, and with only the visible points of curves."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!DOCTYPE.*?>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = _POLYLINE.sub(_simplified, svg)
    svg = re.sub(r"-?\d+\.\d{2,}", lambda number: _short(float(number[0])), svg)
    svg = re.sub(r"(?<=<g) id=\"\w+\"", "", svg)
    svg = re.sub(r"(?<=[:;]) (?=[^\"<>]*\")", "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _simplified(polyline: re.Match[str]) -> str:
    numbers = [float(number) for number in re.findall(r"[-\d.]+", polyline[1])]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    return "M" + " ".join(f"{_short(x)} {_short(y)}" for x, y in visible(points))


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def visible(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points without which a curve would change by more than the tolerance (Douglas and
    Peucker's algorithm)."""
    kept = {0, len(points) - 1}
    spans = [(0, len(points) - 1)]
    while spans:
        first, last = spans.pop()
        between = range(first + 1, last)
        farthest = max(
            between,
            key=lambda at: _distance(points[at], points[first], points[last]),
            default=first,
        )
        if _distance(points[farthest], points[first], points[last]) > _TOLERANCE_PT:
            kept.add(farthest)
            spans += [(first, farthest), (farthest, last)]
    return [points[at] for at in sorted(kept)]


def _distance(
    point: tuple[float, float], start: tuple[float, float], end: tuple[float, float]
) -> float:
    """From a point to a segment of a line."""
    along = complex(*end) - complex(*start)
    offset = complex(*point) - complex(*start)
    if along:
        share = (offset / along).real
        offset -= min(max(share, 0.0), 1.0) * along
    return abs(offset)


def _lines(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.num_users):
        lines.setdefault((row.system, row.weights), []).append(row)
    return lines
