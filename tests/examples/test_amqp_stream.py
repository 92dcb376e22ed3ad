"""The examples that stream over AMQP lose nothing when the worker of their stream is killed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.echo_worker import MODEL
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "Write a long story about a fox."
OPTIONS = ("--step-ms=30",)
_READ_BEFORE_THE_KILL = 10
_TIMEOUT_S = 240


def python(url: str, _: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "amqp_stream.py"), url, QUESTION, MODEL]


def node(url: str, directory: Path) -> list[str]:
    """The example in a directory with the packages of its lock file."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    for name in ("amqp_stream.mjs", "package.json", "package-lock.json"):
        shutil.copy(EXAMPLES / name, directory)
    install = ["npm", "ci", "--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=directory, check=True, timeout=_TIMEOUT_S)
    return ["node", str(directory / "amqp_stream.mjs"), url, QUESTION, MODEL]


def undisturbed(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, text=True, capture_output=True, timeout=_TIMEOUT_S
    ).stdout


@pytest.mark.rabbit
@pytest.mark.parametrize("example", [python, node])
@pytest.mark.usefixtures("smollm2")
def test_a_stream_goes_on_in_another_worker(
    broker: Broker, tmp_path: Path, example: Callable[[str, Path], list[str]]
) -> None:
    command = example(broker.url_of("publisher"), tmp_path)
    worker_url = broker.url_of("worker")
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
def test_a_model_that_was_never_served_is_refused(broker: Broker) -> None:
    refused = subprocess.run(
        [*python(broker.url_of("publisher"), EXAMPLES)[:-1], "never-served"],
        text=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
    )

    assert refused.returncode == 1
    assert refused.stderr == "No worker has ever served the model 'never-served'.\n"
