"""The findings of a run, in the terminal and as a page."""

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from bench import machine
from tests.system.soak.run import Findings
from tests.system.soak.tally import Outcome
from tests.system.soak.traces import LoggedLines, reason_of
from tests.system.soak.watch import Course

_MAX_ERRORS = 20
_MAX_ERROR_CHARS = 2000
_PACKAGES = ("aio-pika", "aiormq")


class Grid(NamedTuple):
    """A table with text in its first column, and numbers in the others."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_findings(console: Console, findings: Findings) -> None:
    for grid in _grids(findings):
        table = Table(title=grid.title)
        for column in grid.columns:
            table.add_column(column, justify="left" if column == grid.columns[0] else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    for line in _faults(findings):
        console.print(line, markup=False, highlight=False)
    console.print(_verdict(findings))


def write_page(path: Path, findings: Findings, broker_version: str) -> None:
    """The same as Markdown, with the commit and the versions."""
    versions = {
        "commit": machine.describe([])["commit"],
        "Python": platform.python_version(),
        "RabbitMQ": broker_version,
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
    plan = findings.plan
    lines = [
        "# Rude traffic for a while",
        "",
        f"`make soak` writes this page. {plan.num_users} users sent requests for"
        f" {plan.duration_s / 60:g} minutes, with seed {plan.seed}"
        f"{', and what the broker said was disturbed' if plan.is_provoked else ''}.",
        "",
    ]
    for grid in _grids(findings):
        lines += [f"## {grid.title}", "", *_markdown(grid), ""]
    lines += [_verdict(findings), ""]
    lines += [line for fault in _faults(findings) for line in ("```", fault, "```", "")]
    lines.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _verdict(findings: Findings) -> str:
    if findings.is_good:
        return "Nothing was found that should not be."
    return f"{len(findings.faults)} faults, {len(findings.tally.errors)} bad answers."


def _faults(findings: Findings) -> Iterator[str]:
    for errors in (findings.faults, findings.tally.errors):
        yield from (error[:_MAX_ERROR_CHARS] for error in errors[:_MAX_ERRORS])
        if len(errors) > _MAX_ERRORS:
            yield f"... and {len(errors) - _MAX_ERRORS} more"


def _grids(findings: Findings) -> list[Grid]:
    grids = (
        _visits(findings),
        _rates(findings),
        _provoked(findings),
        _processes(findings),
        _warnings(findings),
    )
    return [grid for grid in grids if grid.rows]


def _visits(findings: Findings) -> Grid:
    tally = findings.tally
    outcomes = get_args(Outcome)
    rows = [
        [kind, str(tally.num_visits(kind)), *(str(tally.num(o, kind)) for o in outcomes)]
        for kind in tally.kinds
    ]
    total = ["all", str(tally.num_visits()), *(str(tally.num(o)) for o in outcomes)]
    return Grid("Visits", ("kind", "visits", *outcomes), [*rows, total])


def _rates(findings: Findings) -> Grid:
    tally, took_s = findings.tally, findings.took_s
    rows = {
        "took, s": f"{took_s:.0f}",
        "HTTP requests": str(tally.num_requests),
        "HTTP requests a second": f"{tally.num_requests / took_s:.1f}",
        "tokens generated": str(findings.num_generated),
        "tokens a second": f"{findings.num_generated / took_s:.0f}",
        "streams resumed": str(tally.num_resumed),
        "requests sent again": str(tally.num_retried),
        **{f"dead letters, {why}": str(num) for why, num in findings.dead_letters.items()},
    }
    return Grid("Rates", ("", "of the run"), list(rows.items()))


def _provoked(findings: Findings) -> Grid:
    sides = findings.provoked.values()
    names = sorted({name for num_of in sides for name in num_of})
    rows = [[name, *(str(num_of[name]) for num_of in sides)] for name in names]
    return Grid("Provoked", ("fault", *(f"of {name}s" for name in findings.provoked)), rows)


def _processes(findings: Findings) -> Grid:
    rows = [
        [
            name,
            *_memory(course, findings.plan.duration_s),
            str(findings.incidents.get(name, "")),
            str(len(logs.errors)),
            str(logs.warnings.total()),
        ]
        for name, course in findings.courses.items()
        for logs in (findings.logs.get(name, LoggedLines()),)
    ]
    columns = ("first", "settled", "last", "growth", "incidents", "errors", "warnings")
    return Grid("Processes, memory in MiB", ("process", *columns), rows)


def _memory(course: Course, duration_s: float) -> Iterator[str]:
    settled = course.settled(duration_s)
    for samples, at in ((course.samples, 0), (settled, 0), (course.samples, -1)):
        yield f"{samples[at].memory_bytes / 2**20:.1f}" if samples else "?"
    yield f"{course.growth_bytes(duration_s) / 2**20:+.1f}"


def _warnings(findings: Findings) -> Grid:
    is_provoked = findings.plan.is_provoked
    rows = [
        [event, name, str(num), reason_of(event, is_provoked=is_provoked) or "unexpected"]
        for name, lines in findings.logs.items()
        for event, num in lines.warnings.items()
    ]
    return Grid("Warnings", ("event", "process", "times", "why"), rows)


def _markdown(grid: Grid) -> Iterator[str]:
    yield _line(grid.columns)
    yield _line("---" if column == grid.columns[0] else "---:" for column in grid.columns)
    yield from map(_line, grid.rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
