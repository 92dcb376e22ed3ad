"""The command ``warren batch``, in processes of its own."""

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.batch.journal import noted
from cli.gateway_client import connect, request
from tests.support.gateway.serving import served
from tests.support.network.deadly_proxy import DeadlyProxy
from tests.support.workers.batch_files import chat_line, chat_text, read_lines, write_lines
from tests.support.workers.scripted_worker import MODEL, ScriptedJob

ROOT = Path(__file__).parents[3]
MAX_KILLS = 3


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "warren.py", "batch", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()  # if the test has failed before its end


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--broker=amqp://publisher:secret@127.0.0.1:{}/warren", "Workers go on with the jobs"),
        ("--url=http://127.0.0.1:{}", "Run the same command to continue"),
    ],
)
def test_after_ctrl_c_it_says_what_continues(option: str, said: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        option = option.format(silent.getsockname()[1])
        with started(str(source), str(tmp_path / "out.jsonl"), option) as command:
            connection, _ = silent.accept()
            with connection:
                command.send_signal(signal.SIGINT)
                _, shown = command.communicate()

    assert command.returncode == 130
    assert shown.startswith("Stopped. ")
    assert said in shown


def test_after_ctrl_c_the_same_command_waits_for_the_same_batch(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    results = tmp_path / "out.jsonl"
    may_end = threading.Event()

    async def wait_and_repeat(job: ScriptedJob) -> None:
        await job.start()
        await asyncio.to_thread(may_end.wait)
        await job.finish("done")

    with served(script=wait_and_repeat) as url, connect(url) as client:
        try:
            with started(str(source), str(results), f"--url={url}") as command:
                while not (batch_id := noted(results).batch_id):
                    assert command.poll() is None
                    time.sleep(0.05)
                command.send_signal(signal.SIGINT)
                _, shown = command.communicate()
        finally:
            may_end.set()
        with started(str(source), str(results), f"--url={url}") as again:
            again.communicate()
        listed = request(client, "GET", "/v1/batches").json()["data"]

    assert (command.returncode, again.returncode) == (130, 0)
    assert f"{batch_id} continues at the gateway" in shown
    assert shown.endswith(f"end it with: warren batches cancel {batch_id} --url {url}\n")
    assert [batch["id"] for batch in listed] == [batch_id]
    assert [chat_text(line) for line in read_lines(results)] == ["done"]


def test_wherever_the_command_is_killed_it_goes_on_with_the_same_batch(tmp_path: Path) -> None:
    """Processes that really die, at moments that the seed draws. In `test_over_http` it is killed
    at every step, without a process."""
    lines = [chat_line(str(k), content=f"number {k}", model=MODEL) for k in range(20)]
    source, results = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"

    with served() as url, connect(url) as client, DeadlyProxy(url, random.Random(1)) as proxy:
        for num_kills in range(10):
            with started(str(source), str(results), f"--url={proxy.url}") as command:
                if num_kills < MAX_KILLS:
                    proxy.arm(command.kill, longest=3)
                _, shown = command.communicate()
            if command.returncode != -signal.SIGKILL:
                break
        batches = request(client, "GET", "/v1/batches").json()["data"]
        files = request(client, "GET", "/v1/files", params={"purpose": "batch"}).json()["data"]

    assert command.returncode == 0, shown
    assert num_kills > 0
    assert (len(batches), len(files)) == (1, 1)
    assert [chat_text(line) for line in read_lines(results)] == [f"number {k}" for k in range(20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
