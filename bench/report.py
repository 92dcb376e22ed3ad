"""Reports figures as a table in the terminal and as a JSON file."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.figures import Measurement, Row, setting_of

_WIDTH = 168
"""The width of the table if the output is not a terminal."""

_SAME = ("machine", "commit", "client")

Column = tuple[str, Callable[[Row], str]]
"""The heading of a column, and its text in a row."""


def show(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print a line for each row, with a rule between settings."""
    table = Table("in", "users", "system", "weights", title=title)
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    ordered = sorted(rows, key=setting_of)
    for row, following in zip(ordered, [*ordered[1:], None], strict=True):
        cells = [text(row) for _, text in columns]
        is_last = following is not None and setting_of(following) != setting_of(row)
        setting = map(str, setting_of(row))
        table.add_row(*setting, row.system, row.weights, *cells, end_section=is_last)
    console().print(table)


def console() -> Console:
    """The console for tables: the terminal, or a file that is wide enough."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=_WIDTH)


def write(
    path: Path,
    about: dict[str, Any],
    rows: Sequence[Row],
    measurements: Sequence[Measurement],
) -> None:
    """Write the medians and each run, with the machine and the versions."""
    content = {
        **about,
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(one) for one in measurements],
    }
    write_json(path, content)


def continued(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any], list[Measurement]]:
    """``about`` with the versions and commands that `write` stored in ``path``, and the stored
    runs. Raises `typer.BadParameter` if the stored runs were measured elsewhere or with something
    else."""
    if not path.exists():
        return about, []
    content = json.loads(path.read_text())
    for name in _SAME:
        if content[name] != about[name]:
            raise typer.BadParameter(f"{path.name} is of another {name}: {content[name]}")
    versions = {**content["versions"], **about["versions"]}
    commands = [*content.get("earlier_commands", []), content["command"]]
    both = {**about, "earlier_commands": commands, "versions": versions}
    return both, msgspec.convert(content["runs"], list[Measurement])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` with a line for each value and list item, fractions with four digits."""
    content = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.4g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    values = (f" {json.dumps(name)}: {_lines(value)}" for name, value in content.items())
    path.write_text("{\n" + ",\n".join(values) + "\n}\n")


def _lines(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"


def rate(row: Row) -> str:
    """The median of tokens per second, and the range over several runs."""
    median = f"{row.figures.tokens_per_s:.0f}"
    if row.num_runs == 1:
        return median
    return f"{median} ({row.slowest_tokens_per_s:.0f}-{row.fastest_tokens_per_s:.0f})"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
