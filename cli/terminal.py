"""Output of commands on the terminal, and progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from shared.printable import printable_json

output = Console(highlight=False, emoji=False)
"""Results, on standard output."""
notices = Console(highlight=False, emoji=False, stderr=True)
"""Everything else, on standard error."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON, without colours."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    output.print(printable_json(text), soft_wrap=True, markup=False)


def number_of(count: int, noun: str) -> str:
    """A number of things, such as "1 request" and "2 requests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each stage: call with the stage's name, the amount done and the
    total.

    A total of 0 is unknown.
    """
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=notices)
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        progress.start()
        if stage not in tasks:
            for earlier in tasks.values():
                progress.update(earlier, total=1, completed=1)
            tasks[stage] = progress.add_task(stage, total=None)
        progress.update(tasks[stage], completed=done, total=total or None)

    try:
        yield show
    finally:
        if tasks:
            progress.stop()


@contextmanager
def counted(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show one progress bar from the first call on: call with the number done, the total and a
    remark."""
    columns = (
        TextColumn(description),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    progress = Progress(*columns, TimeRemainingColumn(), console=notices)
    task = progress.add_task("", total=None, remark="")

    def show(done: int, total: int, remark: str) -> None:
        progress.start()
        progress.update(task, completed=done, total=total, remark=remark)

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()
