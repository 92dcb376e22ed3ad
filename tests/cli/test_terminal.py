"""What commands print."""

import pytest

from cli.terminal import counted, output
from shared.printable import escape_controls, printable


def test_text_is_not_taken_for_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    output.print("a :cat: at [bold]12:00:00[/]", markup=False)

    assert capsys.readouterr().out == "a :cat: at [bold]12:00:00[/]\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cmpl-1 für 猫", "cmpl-1 für 猫"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\nb\x9b2J\u202e", r"a\nb\x9b2J\u202e"),
    ],
)
def test_what_would_control_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_and_tabs_are_no_controls() -> None:
    assert escape_controls("a\n\tb\r\x1b[2J\x7f\x9b2J 👩\u200d💻\xa0") == (
        "a\n\tb\\r\\x1b[2J\\x7f\\x9b2J 👩\u200d💻\xa0"
    )


def test_no_progress_is_shown_before_there_is_any(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("in.jsonl"):
        pass

    assert capsys.readouterr().err == ""


def test_progress_is_shown_from_its_beginning_on(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("in.jsonl") as show:
        show(1, 2, "0 failed")

    shown = capsys.readouterr().err
    assert "in.jsonl" in shown
    assert "1/2" in shown
