"""Tables that cut nothing off, however narrow the terminal is."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cli.terminal import output
from shared.printable import printable

_UNLIMITED = 10_000
_FOLDED_ABOVE = 16
"""Texts of more cells are folded to this width before columns are left out for them."""
_WHOLE_UP_TO = 12
"""Texts of at most so many cells are not folded."""
_GAP = 2

Cell: TypeAlias = str | Text


class Column(NamedTuple):
    """A column of a table."""

    title: str
    is_number: bool = False
    """Numbers are aligned to the right and never folded."""
    rank: int = 0
    """If the table is too wide, the columns of the highest rank are left out first, and columns of
    rank 0 never."""


class _Filled(NamedTuple):
    """A column with its cells."""

    column: Column
    cells: list[Text]

    @property
    def title(self) -> str:
        return self.column.title

    @property
    def width(self) -> int:
        widest = max(cell_len(str(text)) for text in (*self.title.split("\n"), *self.cells))
        return widest if self.column.is_number else min(widest, _FOLDED_ABOVE)

    def broken(self) -> "_Filled":
        """The column with each word of its title on a line of its own, if it has numbers."""
        if not self.column.is_number:
            return self
        return self._replace(column=self.column._replace(title=self.title.replace(" ", "\n")))


class FittedTable:
    """A table that takes as much room as it needs.

    If there is less room, it breaks the titles of numbers into lines, folds long texts, and leaves
    columns out, which it names.
    """

    def __init__(
        self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]
    ) -> None:
        self._title = title
        self._is_empty = not rows
        self._columns = [
            _Filled(column, [_text(row[k]) for row in rows]) for k, column in enumerate(columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, left_out = self._fitting(options.max_width)
        table = Table(box=None, pad_edge=False)
        for one in columns:
            table.add_column(
                one.title,
                justify="right" if one.column.is_number else "left",
                header_style="dim",
                no_wrap=one.column.is_number or one.width <= _WHOLE_UP_TO,
                overflow="fold",
            )
        for row in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*row)
        yield Text(self._title, style="bold")
        yield table
        if self._is_empty:
            yield Text("  none", style="dim")
        if left_out:
            yield Text(f"  left out at this width: {', '.join(left_out)}", style="dim")
        yield Text()

    def _fitting(self, width: int) -> tuple[list[_Filled], list[str]]:
        """The columns that are shown in this width, and the titles of the others."""
        columns, left_out = list(self._columns), list[str]()
        if _total(columns) > width:
            columns = [column.broken() for column in columns]
        while _total(columns) > width:
            last = max(columns, key=lambda one: one.column.rank)
            if last.column.rank == 0:
                break
            columns.remove(last)
            left_out.append(last.title.replace("\n", " "))
        return columns, left_out


def _text(cell: Cell) -> Text:
    """A cell whose text controls neither the terminal nor its style."""
    return cell if isinstance(cell, Text) else Text(printable(cell))


def _total(columns: list[_Filled]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP


def print_tables(tables: RenderableType) -> None:
    """Print on standard output, in full width if it is not a terminal."""
    if output.file.isatty():
        output.print(tables)
    else:
        Console(file=output.file, width=_UNLIMITED, highlight=False, emoji=False).print(tables)
