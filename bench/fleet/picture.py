"""The picture of the curve."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench import plots
from bench.fleet.curve import Curve
from bench.fleet.results import of_curve
from cli.size.costs import ROLES


def draw(path: Path, curve: Curve) -> None:
    """Throughput by the number of workers, and what uses the cores."""
    first, *_ = line = of_curve(curve)
    figure, (throughput, cores) = plots.new_figure(2)
    numbers = [point.num_workers for point in line]
    rate = first.received.tokens_per_s / first.num_workers
    throughput.plot(numbers, [rate * number for number in numbers], "k:", label="linear")
    throughput.plot(
        numbers,
        [point.received.tokens_per_s for point in line],
        marker="o",
        linewidth=2.4,
        label="measured",
    )
    throughput.legend(fontsize="small")
    cores.stackplot(
        numbers,
        [[point.cores[role] for point in line] for role in (*ROLES, "client")],
        labels=(*ROLES, "client"),
        alpha=0.8,
    )
    cores.legend(fontsize="small", loc="upper left")
    _label(throughput, numbers, "tokens per second")
    _label(cores, numbers, "cores")
    plots.save(figure, path)


def _label(axis: Axes, numbers: Sequence[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, [str(number) for number in numbers])
    plots.label_axis(axis, "workers", label)
