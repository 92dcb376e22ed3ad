"""``warren status`` and ``warren top`` against a real gateway."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.main import app
from cli.manage.status import Gateways, duration, render, short_id
from gateway.intake.keys.key_file import KeyFile
from tests.support.deployment.command import warren
from tests.support.gateway.serving import served

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_tables_name_what_there_is(url: str) -> None:
    shown = run("status", "--url", url)

    assert "gateway ok" in shown
    for title in ("Workers", "Queues", "Streams of this gateway (0)", "Tenants"):
        assert title in shown


def test_one_request_is_not_several() -> None:
    status = a_long_status()
    console = Console(width=200)

    with console.capture() as capture:
        for num in (1, 2):
            status["gateway"]["num_requests"] = status["num_dead_letters"] = num
            console.print(render(status))

    assert re.findall(r"(\d requests?) +(\d dead letters?)\n", capture.get()) == [
        ("1 request", "1 dead letter"),
        ("2 requests", "2 dead letters"),
    ]


def test_top_adds_up_what_gateways_behind_a_proxy_say(url: str) -> None:
    gateways = Gateways()
    with served() as other:
        for one in (url, other, url):
            seen = gateways.merged(json.loads(run("status", "--url", one, "--json")))

    assert seen["num_gateways"] == 2
    assert seen["gateway"]["num_requests"] == 0
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(seen))
    assert "Streams of 2 gateways (0)" in capture.get()


def a_long_status() -> dict[str, Any]:
    """A status as large deployments have it."""
    model, tenant = "HuggingFaceTB/SmolLM2-135M-Instruct", "department-of-linguistics"
    worker = {
        "id": "3f9c2a71d0b84e55a8f6e1c2b3d4f5a6",
        "model": model,
        "state": "serving",
        "num_running": 60,
        "max_num_seqs": 64,
        "num_waiting": 12,
        "kv_usage": 0.93,
        "num_answered": 123_456,
        "started_at": time.time() - 40_000,
    }
    counts = ("requests", "in_flight", "failed", "cancelled", "prompt_tokens", "cached_tokens")
    return {
        "gateway": {"version": "0.1.0", "status": "ok", "started_at": 0.0, "num_requests": 3},
        "workers": [worker],
        "queues": [
            {
                "model": model,
                "lane": "interactive",
                "num_waiting": 1234,
                "oldest_s": 4000.0,
                "num_consumers": 12,
            }
        ],
        "streams": [
            {
                "id": "alice.monthly-report-2026-10",
                "tenant": tenant,
                "model": model,
                "state": "running",
                "num_crashes": 1,
                "num_workers": 2,
                "worker": worker["id"],
                "num_tokens": 12_345,
                "created_at": time.time() - 100,
            }
        ],
        "num_streams": 1,
        "tenants": [
            {
                "tenant": tenant,
                **{f"num_{name}": 1_234_567_890 for name in (*counts, "generated_tokens")},
            }
        ],
        "keys": [
            {
                "id": "3c5c4c7894",
                "tenant": tenant,
                "label": "the crawler on host 17",
                "num_requests": 1000,
                "requests_per_minute": 6000,
                "num_tokens": 1_000_000,
                "tokens_per_minute": 60_000_000,
                "num_running": 12,
                "max_concurrent": 64,
            }
        ],
        "num_dead_letters": 0,
        "recent": {"tokens_per_s": 12_345.6, "num_first_tokens": 300, "first_token_s": 0.42},
    }


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"engine": "vllm 0.32.0", "state": "engine_away"}, ["vllm 0.32.0", "engine away"]),
        ({"engine": ""}, ["own", "serving"]),
        ({}, ["own", "serving"]),
    ],
    ids=["away", "Warren's own", "an earlier gateway"],
)
def test_a_worker_has_the_state_of_its_engine(fields: dict[str, str], shown: list[str]) -> None:
    status = a_long_status()
    status["workers"][0].update(fields)
    console = Console(width=200)

    with console.capture() as capture:
        console.print(render(status))

    (line,) = [line for line in capture.get().splitlines() if "60 of 64" in line]
    assert [text for text in shown if text not in line] == []


def test_rates_of_several_gateways_are_added_up() -> None:
    gateways = Gateways()
    first, second, old = a_long_status(), a_long_status(), a_long_status()
    for seen, name in ((first, "1"), (second, "2"), (old, "3")):
        seen["gateway"]["id"] = name
    second["recent"] = {"tokens_per_s": 4.4, "num_first_tokens": 0, "first_token_s": None}
    del old["recent"]
    for seen in (first, second):
        gateways.merged(seen)
    console = Console(width=120)

    with console.capture() as capture:
        console.print(render(gateways.merged(old)))

    line = "12,350 tokens/s, 20.0 answers/s, first token within 0.4 s (95th percentile)"
    assert line in capture.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_name_is_cut_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(a_long_status()))

    shown = capture.get()
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for name in ("3f9c2a71", "3c5c4c7894", "60 of 64", "1,234,567,890", "running, 1"):
        assert name in shown


def test_what_is_piped_has_whole_ids(url: str) -> None:
    shown = run("status", "--url", url)
    (worker,) = json.loads(run("status", "--url", url, "--json"))["workers"]

    assert worker["id"] in shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("chatcmpl-3f9c2a71d0b84e55a8f6e1c2b3d4f5a6", "3f9c2a71"),
        ("resp_3f9c2a71d0b84e55a8f6e1c2b3d4f5a6", "3f9c2a71"),
        ("alice.monthly-report-2026-10", "alice.monthly-report-2026-10"),
        ("-", "-"),
    ],
)
def test_only_random_ids_are_shortened(name: str, shown: str) -> None:
    assert short_id(name) == shown


def test_json_is_the_gateways_answer(url: str) -> None:
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
        done = warren("status", "--url", url)

    assert done.returncode == 2
    assert done.stderr == (
        f"error: {url} requires an API key: set OPENAI_API_KEY, or name a file that contains it "
        "with --api-key-file\n"
    )


def test_top_shows_the_status_until_it_is_interrupted(url: str) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, "warren.py", "top", "--url", url, "--interval", "0.2"]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while shown.count(b"Workers") < 2:
                shown += os.read(mine, 4096)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # which ends the output of a process
                while os.read(mine, 4096):
                    """Let it write on until it has ended."""
            process.wait()
        finally:
            process.kill()  # if the test has failed before its end
            os.close(mine)

    assert process.returncode == 0


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
