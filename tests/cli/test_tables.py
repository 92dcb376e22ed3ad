"""Tables in little room."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from cli.tables import Column, FittedTable, print_tables

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct-with-a-long-suffix"
COLUMNS = (
    Column("id"),
    Column("model"),
    Column("input tokens", is_number=True),
    Column("takeovers", is_number=True, rank=2),
    Column("uptime", is_number=True, rank=1),
)
ROW = ("3f9c2a71", MODEL, "12,345,678", "0", "12 h 34 min")


def shown_in(width: int, *rows: tuple[str | Text, ...], title: str = "Workers") -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(FittedTable(title, COLUMNS, rows))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    return lines


def test_with_enough_room_nothing_is_broken() -> None:
    title, head, row, *_ = shown_in(120, ROW)

    assert title == "Workers"
    assert "input tokens" in head
    assert re.split(" {2,}", row.strip()) == [*ROW]


def test_titles_of_numbers_are_broken_before_columns_are_left_out() -> None:
    lines = shown_in(63, ROW)

    assert lines[1].split() == ["input"]
    assert not any("left out" in line for line in lines)


def test_the_least_useful_columns_are_left_out_and_named() -> None:
    assert "  left out at this width: takeovers" in shown_in(60, ROW)
    assert "  left out at this width: takeovers, uptime" in shown_in(50, ROW)


@pytest.mark.parametrize("width", [80, 60, 40])
def test_long_texts_are_folded_and_short_ones_are_not(width: int) -> None:
    lines = shown_in(width, ROW)

    first = next(k for k, line in enumerate(lines) if line.startswith("3f9c2a71  Hugg"))
    rest = [line[10:].split()[0] for line in lines[first:] if line[10:] and "left" not in line]
    assert "".join(rest) == MODEL
    assert "12,345,678" in lines[first]


def test_an_empty_table_says_so() -> None:
    assert "  none" in shown_in(80)


def test_text_is_not_taken_for_markup_and_controls_nothing() -> None:
    lines = shown_in(120, ("[red]a\x1b[2J", "m", "1", "2", "3"))

    assert r"[red]a\x1b[2J" in lines[2]


def test_what_is_piped_is_not_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("x" * 300, *ROW[1:])
    print_tables(FittedTable("Workers", COLUMNS, [row]))

    assert "x" * 300 in capsys.readouterr().out
