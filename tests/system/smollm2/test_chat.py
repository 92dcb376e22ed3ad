"""`warren chat` in a terminal's place, while the gateway that answers is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import ROOT, WarrenProcess, free_port
from tests.support.gateway.http import SECRET

pytestmark = pytest.mark.rabbit

NUM_TOKENS = 100


@contextmanager
def chatting(url: str, notes: Path) -> Iterator[subprocess.Popen[str]]:
    """A chat whose answers are piped, and everything else is written to ``notes``."""
    with (
        notes.open("w") as stderr,
        subprocess.Popen(
            [
                *(sys.executable, "warren.py", "chat", f"--url={url}/v1"),
                *("--model=smollm2", "--temperature=0", f"--max-tokens={NUM_TOKENS}"),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "80"},
        ) as chat,
    ):
        yield chat


def test_an_answer_is_complete_although_its_gateway_was_killed(
    broker: Broker, workers: list[WarrenProcess], tmp_path: Path
) -> None:
    port = free_port()
    args = ["warren.py", "gateway", f"--broker={broker.url_of('gateway')}", f"--port={port}"]
    gateway = WarrenProcess([*args, f"--secret={SECRET}"], port, tmp_path / "gateway")
    question = "Tell a story.\n"
    with gateway:
        with chatting(gateway.url, tmp_path / "undisturbed") as chat:
            undisturbed = chat.communicate(question)[0]
        with chatting(gateway.url, tmp_path / "notes") as chat:
            assert chat.stdin is not None
            assert chat.stdout is not None
            chat.stdin.write(question)
            chat.stdin.close()
            answer = chat.stdout.read(40)
            gateway.kill()
            gateway.start()
            answer += chat.stdout.read()
            assert chat.wait() == 0

    assert "the connection was lost; continuing" in (tmp_path / "notes").read_text()
    assert len(undisturbed) > 100
    assert answer == undisturbed
