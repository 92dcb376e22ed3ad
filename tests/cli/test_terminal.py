"""What commands print."""

import pytest

from cli.terminal import output, printable


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
