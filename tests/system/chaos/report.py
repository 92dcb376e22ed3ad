"""The table of results, in the terminal and as a page."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.table import Table

from bench import machine
from tests.support.deployment.broker import RabbitNode
from tests.system.chaos.campaign import Row

_TITLE = "Every stream beside its undisturbed run"
_PACKAGES = ("aio-pika", "aiormq", "torch")
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "fault": lambda row: row.title,
    "tries": lambda row: str(row.num_tries),
    "streams": lambda row: str(row.tally.num_streams),
    "left": lambda row: str(row.tally.num_left),
    "limited": lambda row: str(row.tally.num_limited),
    "resumed": lambda row: str(row.tally.num_resumed),
    "worst gap, s": lambda row: f"{row.tally.worst_gap_s:.2f}",
    "took, s": lambda row: f"{row.duration_s:.0f}",
    "lost": lambda row: str(row.tally.num_lost),
    "repeated": lambda row: str(row.tally.num_repeated),
    "changed": lambda row: str(row.tally.num_changed),
    "failed": lambda row: str(row.tally.num_failed),
    "diverged": lambda row: str(row.tally.num_diverged),
}
"""The text of each cell, by its heading."""


def table(rows: Sequence[Row]) -> Table:
    table = Table(title=_TITLE)
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for row in rows:
        table.add_row(*(text(row) for text in _COLUMNS.values()))
    return table


def write_page(path: Path, rows: Sequence[Row], node: RabbitNode) -> None:
    """The table as Markdown, with the commit and the versions."""
    versions = {
        "commit": machine.describe([])["commit"],
        "Python": platform.python_version(),
        "RabbitMQ": node.ctl("--silent", "version").strip(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
    lines = [
        f"# {_TITLE}",
        "",
        "`make chaos` writes this page. A gap is the time between two events of a stream,",
        "whatever happened in between; a client that was cut off resumed its stream at any",
        "gateway. Streams whose client left in the middle ran beside those that were compared.",
        "The clients belong to five tenants with weights; four have limits, of concurrent",
        "requests, requests or tokens a minute, and *limited* counts the refusals, after which a",
        "client tries again and waits for the limits. At the end of each part every answer must",
        "have a usage record, with its tenant and the tokens that were read. Streams of engines",
        "over HTTP are compared with their logs, because such an engine may not repeat itself",
        "exactly, and *diverged* counts those that differ from the undisturbed run.",
        "Beside the text, the rows of forks compare forks with undisturbed forks, those of",
        "receipts compare the signed tokens with the tokens that were read, those of audits",
        "demand that no two workers disagree, and those of deadlines permit an answer that ends",
        "early with `deadline_exceeded`.",
        "",
        _line(_COLUMNS),
        _line("---" if heading == "fault" else "---:" for heading in _COLUMNS),
        *(_line(text(row) for text in _COLUMNS.values()) for row in rows),
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
