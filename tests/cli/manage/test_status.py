"""``warren status`` and ``warren top`` against a real gateway."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.manage.status import duration
from gateway.intake.key_file import KeyFile
from tests.support.gateway.serving import served

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_tables_name_what_there_is() -> None:
    with served() as url:
        shown = run("status", "--url", url)

    assert "gateway ok" in shown
    for title in ("Workers", "Queues", "Streams of this gateway (0)", "Tenants"):
        assert title in shown


def test_json_is_the_gateways_answer() -> None:
    with served() as url:
        shown = json.loads(run("status", "--url", url, "--json"))

    assert shown["gateway"]["status"] == "ok"
    assert set(shown) >= {"workers", "queues", "streams", "tenants", "num_dead_letters"}


def test_the_key_comes_from_a_file(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    (tmp_path / "key").write_text(f"{keys.add('ops', scopes=('operator',))}\n")
    with served(keys_file=str(keys.path)) as url:
        shown = run("status", "--url", url, "--api-key-file", str(tmp_path / "key"))

    assert "gateway ok" in shown


def test_a_missing_key_is_said_in_one_line(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    keys.add("ops")
    with served(keys_file=str(keys.path)) as url:
        command = [sys.executable, "warren.py", "status", "--url", url]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert done.returncode == 2
    assert done.stderr.startswith("error: An API key is required.")


def test_top_shows_the_status_until_it_is_interrupted() -> None:
    with served() as url:
        mine, theirs = pty.openpty()
        command = [sys.executable, "warren.py", "top", "--url", url, "--interval", "0.2"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        while shown.count(b"Workers") < 2:
            shown += os.read(mine, 4096)
        process.send_signal(2)
        code = process.wait(20)
        os.close(mine)

    assert code == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (59.6, "60 s"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
