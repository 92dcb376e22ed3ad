"""A report continues with the runs that it contains."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer

from bench.figures import Figures, Measurement, rows_of
from bench.report import continued, write

ABOUT: dict[str, Any] = {
    "machine": {"cores": 2},
    "commit": "abc",
    "client": "own",
    "command": ["serving"],
    "versions": {"torch": "2", "peer": "1"},
}
FIGURES = Figures(**dict.fromkeys((field.name for field in dataclasses.fields(Figures)), 1.5))
RUN = Measurement(
    system="ours",
    weights="q8_0",
    is_peer=False,
    num_users=8,
    run=1,
    start_s=2.0,
    memory_bytes=3,
    other_cores=0.1,
    figures=FIGURES,
)


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write(path, ABOUT, rows_of([RUN]), [RUN])

    about, runs = continued(path, {**ABOUT, "versions": {"torch": "2", "other": "3"}})

    assert runs == [RUN]
    assert about["versions"] == {"torch": "2", "peer": "1", "other": "3"}
    assert about["earlier_commands"] == [["serving"]]


def test_without_a_file_there_are_no_runs(tmp_path: Path) -> None:
    assert continued(tmp_path / "none.json", ABOUT) == (ABOUT, [])


@pytest.mark.parametrize("name", ["machine", "commit", "client"])
def test_runs_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "figures.json"
    write(path, ABOUT, rows_of([RUN]), [RUN])

    with pytest.raises(typer.BadParameter, match=f"another {name}"):
        continued(path, {**ABOUT, name: "another"})
