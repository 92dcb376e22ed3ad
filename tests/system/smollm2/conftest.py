"""Whole deployments: all processes, the broker and the model are real.

The commands ``worker``, ``gateway`` and ``serve`` are started as users start them. They take
gigabytes, and end with the tests of this package.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess

FP32 = ("--dtype=float32", "--compute-threads=1")
LOADS_WITHIN_S = 180
"""Two workers that start at once took 40 s on a busy machine with two cores."""


@pytest.fixture(scope="package")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="package")
def workers(broker: Broker, smollm2: Path, logs: Path) -> Iterator[list[WarrenProcess]]:
    """Two workers of SmolLM2 in fp32 on the broker."""
    url = broker.url_of("worker")
    with ExitStack() as stack:
        # On a busy machine a killed gateway takes long to start again.
        options = (*FP32, "--disconnect-grace-s=60")
        started = [processes.worker(url, logs / f"worker{k}", *options) for k in range(2)]
        for worker in started:
            worker.may_be_copy = False
            worker.start_timeout_s = LOADS_WITHIN_S
            worker.start()
            stack.callback(worker.terminate)
        for worker in started:
            worker.wait_healthy()
        yield started


@pytest.fixture(scope="package")
def gateway(broker: Broker, workers: list[WarrenProcess], logs: Path) -> Iterator[WarrenProcess]:
    process = processes.gateway(broker.url_of("gateway"), logs / "gateway")
    process.may_be_copy = False
    with process:
        yield process


@pytest.fixture(scope="package")
def embedded(smollm2: Path, logs: Path) -> Iterator[WarrenProcess]:
    """``warren serve``: gateway and worker in a single process."""
    process = processes.serve(logs / "serve", *FP32)
    process.may_be_copy = False
    process.start_timeout_s = LOADS_WITHIN_S
    with process:
        yield process
        assert process.terminate() == 0


@pytest.fixture(
    params=["embedded", pytest.param("gateway", marks=pytest.mark.rabbit)], scope="package"
)
def deployment(request: pytest.FixtureRequest) -> WarrenProcess:
    """Each kind of deployment in turn."""
    process: WarrenProcess = request.getfixturevalue(request.param)
    return process


@pytest.fixture(scope="package")
def client(deployment: WarrenProcess) -> Iterator[openai.OpenAI]:
    url = f"{deployment.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
