"""The examples that stream over AMQP lose nothing when the worker of their stream is killed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.echo_worker import MODEL
from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE_MODULES = EXAMPLES / "node_modules" / "amqplib"
QUESTION = "Write a long story about a fox."
OPTIONS = ("--step-ms=30",)
_READ_BEFORE_THE_KILL = 10
_TIMEOUT_S = 60


def python(url: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "amqp_stream.py"), url, QUESTION, MODEL]


def node(url: str) -> list[str]:
    command = shutil.which("node")
    if command is None or not NODE_MODULES.exists():
        pytest.skip("needs node, and `npm install` in examples/")
    return [command, str(EXAMPLES / "amqp_stream.mjs"), url, QUESTION, MODEL]


def undisturbed(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, text=True, capture_output=True, timeout=_TIMEOUT_S
    ).stdout


@pytest.mark.rabbit
@pytest.mark.parametrize("example", [python, node])
@pytest.mark.usefixtures("smollm2")
def test_a_stream_goes_on_in_another_worker(
    own_broker: RabbitNode, tmp_path: Path, example: Callable[[str], list[str]]
) -> None:
    command = example(own_broker.url_of("publisher"))
    worker_url = own_broker.url_of("worker")
    with processes.echo_worker(worker_url, tmp_path / "first.log", *OPTIONS) as first:
        expected = undisturbed(command)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            said = running.stdout.read(_READ_BEFORE_THE_KILL)
            first.kill()
            with processes.echo_worker(worker_url, tmp_path / "second.log", *OPTIONS):
                said += running.stdout.read()
                assert running.wait(_TIMEOUT_S) == 0

    assert said == expected
    assert len(said.strip()) > _READ_BEFORE_THE_KILL


@pytest.mark.rabbit
def test_a_model_that_was_never_served_is_refused(own_broker: RabbitNode) -> None:
    refused = subprocess.run(
        python(own_broker.url_of("publisher")), text=True, capture_output=True, timeout=_TIMEOUT_S
    )

    assert refused.returncode == 1
    assert "UnroutableError" in refused.stderr
