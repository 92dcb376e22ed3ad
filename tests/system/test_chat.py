"""`warren chat` in a terminal's place, while the gateway that answers is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.broker import Broker
from tests.support.http import SECRET
from tests.support.processes import ROOT, WarrenProcess, free_port

pytestmark = pytest.mark.rabbit


def start_chat(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "warren.py", "chat", f"--url={url}/v1", "--temperature=0"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "80"},
    )


def answer_of(screen: str) -> str:
    """The answer on the screen, without the remarks between its pieces."""
    _, _, said = screen.partition("echo  ")
    return "".join(said.replace("\n[the connection was lost; continuing ...]\n", "").split("\n"))


def test_an_answer_is_complete_although_its_gateway_was_killed(
    broker: Broker, smollm2: Path, tmp_path: Path
) -> None:
    port = free_port()
    args = ["warren.py", "gateway", f"--broker={broker.url_of('gateway')}", f"--port={port}"]
    gateway = WarrenProcess([*args, f"--secret={SECRET}"], port, tmp_path / "gateway")
    worker = processes.echo_worker(broker.url_of("worker"), tmp_path / "worker", "--step-ms=15")
    question = "Tell a story.\n"
    with worker, gateway:
        undisturbed = start_chat(gateway.url).communicate(question, timeout=60)[0]
        chat = start_chat(gateway.url)
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(question)
        chat.stdin.close()
        screen = ""
        while len(answer_of(screen)) < 40:
            screen += chat.stdout.read(1)
        gateway.kill()
        gateway.start()
        screen += chat.stdout.read()
        assert chat.wait(timeout=60) == 0

    assert "the connection was lost; continuing" in screen
    assert answer_of(screen) == answer_of(undisturbed)
