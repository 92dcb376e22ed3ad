"""Reports figures as a table, as a JSON file and as a plot."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.figures import Figure

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm")
_HEADINGS = ("section", "what", "value", "", "ratio", "goal", "", "")


def table(figures: Iterable[Figure]) -> str:
    """A line for each figure, in columns."""
    rows = [_HEADINGS, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in (2, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(figure: Figure) -> tuple[str, ...]:
    verdict = {None: "", True: "met", False: "MISSED"}[figure.is_met]
    return (
        figure.section,
        figure.name,
        "-" if figure.value is None else f"{figure.value:.4g}",
        figure.unit,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        "" if figure.goal is None else f"{figure.goal:.2f}",
        verdict,
        figure.note,
    )


def describe(device: torch.device, scale: str, dtype: torch.dtype) -> dict[str, Any]:
    """The machine and the versions with which the figures were measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": _device_name(device),
        "model": scale,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write(path: Path, about: dict[str, Any], figures: Iterable[Figure]) -> None:
    """Write a line for each figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(_fields(figure)) for figure in figures)
    path.write_text(f'{head},\n "figures": [\n{lines}\n ]\n}}\n')


def _fields(figure: Figure) -> dict[str, Any]:
    """What is known of a figure, in five digits."""
    known = dataclasses.asdict(figure) | {"is_met": figure.is_met}
    return {
        name: float(f"{field:.5g}") if isinstance(field, float) else field
        for name, field in known.items()
        if field not in (None, "")
    }


def draw(path: Path, points: Sequence[tuple[int, float, float]]) -> bool:
    """Plot step time and its floor, in ms, over the batch size. Returns False if matplotlib is
    missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure as Picture

    mpl.rcParams["svg.hashsalt"] = "warren"  # equal figures produce equal files
    picture = Picture(figsize=(5.0, 3.6), layout="constrained")
    axis = picture.subplots()
    sizes = [size for size, _, _ in points]
    axis.plot(sizes, [step for _, step, _ in points], marker="o", linewidth=2.4, label="step")
    axis.plot(sizes, [floor for _, _, floor in points], linestyle="--", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlabel("sequences")
    axis.set_ylabel("ms a decode step")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, metadata={"Date": None})
    return True


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return platform.processor() or platform.machine()
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit; None if the tree has no git history."""
    command = ("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
