"""`warren chat` in a terminal's place, while the gateway that answers is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import ROOT, WarrenProcess, free_port
from tests.support.gateway.http import SECRET

pytestmark = pytest.mark.rabbit

NUM_TOKENS = 100


def start_chat(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "warren.py", "chat", f"--url={url}/v1"),
            *("--model=smollm2", "--temperature=0", f"--max-tokens={NUM_TOKENS}"),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "80"},
    )


def answer_of(screen: str) -> str:
    """The answer on the screen, without the remarks between its pieces."""
    _, _, said = screen.partition("\n\nsmollm2  ")
    return "".join(said.replace("\n[the connection was lost; continuing ...]\n", "").split("\n"))


def test_an_answer_is_complete_although_its_gateway_was_killed(
    broker: Broker, workers: list[WarrenProcess], tmp_path: Path
) -> None:
    port = free_port()
    args = ["warren.py", "gateway", f"--broker={broker.url_of('gateway')}", f"--port={port}"]
    gateway = WarrenProcess([*args, f"--secret={SECRET}"], port, tmp_path / "gateway")
    question = "Tell a story.\n"
    with gateway:
        with start_chat(gateway.url) as chat:
            undisturbed = chat.communicate(question, timeout=100)[0]
        with start_chat(gateway.url) as chat:
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
    assert len(answer_of(undisturbed)) > 100
    assert answer_of(screen) == answer_of(undisturbed)
