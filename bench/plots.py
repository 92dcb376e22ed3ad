"""Plots figures as SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import Row

mpl.rcParams["svg.hashsalt"] = "warren"  # equal figures produce equal files
mpl.rcParams["font.sans-serif"] = ["DejaVu Sans"]
mpl.rcParams["svg.fonttype"] = "none"  # a tenth of the size of outlines
_INCHES = (5.0, 3.6)

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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _lines(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.num_users):
        lines.setdefault((row.system, row.weights), []).append(row)
    return lines
