"""A rolling upgrade from the last release to this tree and back, with the processes of both."""

import json
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import httpx
import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS, ROOT

pytestmark = pytest.mark.rabbit

FIRST = "2d012fd7"
"""The commit that is upgraded while the current commit has no tag before it."""
PATIENCE_S = 300.0
PROMPT = {"model": "echo", "max_tokens": 1000, "ignore_eos": True, "seed": 5}
COMPLETION = {**PROMPT, "prompt": "Who goes on?"}
RESPONSE = {"model": "echo", "input": "Who remembers?", "max_output_tokens": 5}


def git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *args], text=True, capture_output=True)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """The sources of the last release before this commit."""
    tag = git("describe", "--tags", "--abbrev=0", "--match=v*", "HEAD^").stdout.strip()
    archive = tmp_path / "released.tar"
    made = git("archive", f"--output={archive}", tag or FIRST)
    if made.returncode:
        pytest.skip(f"the history of this checkout does not have {tag or FIRST}")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path / "released", filter="data")
    return tmp_path / "released"


def text_of(lines: Iterator[str]) -> str:
    """The text of a completion's stream, up to its end."""
    pieces: list[str] = []
    for line in lines:
        if line == "data: [DONE]":
            return "".join(pieces)
        if line.startswith("data: "):
            pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    raise AssertionError("the stream has no end")


def used_by(client: httpx.Client, num_requests: int) -> dict[str, int]:
    """What requests have used, once so many are recorded: records go through the broker."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for row in client.get("/v1/usage", params={"group_by": "model"}).json()["data"]:
            if row["requests"] == num_requests:
                return dict(row)
        time.sleep(0.1)
    raise AssertionError(f"there are no records of {num_requests} requests")


@pytest.mark.timeout(600)
def test_an_upgrade_and_its_withdrawal_lose_neither_streams_nor_what_is_stored(
    broker: Broker, released: Path, tmp_path: Path
) -> None:
    data = f"--data-dir={tmp_path / 'data'}"
    of_gateway, of_worker = broker.url_of("gateway"), broker.url_of("worker")
    with ExitStack() as stack:
        log = tmp_path / "processes"
        start = stack.enter_context
        # So slow that the answer has not ended when the new worker has started, on any machine.
        old_worker = start(processes.echo_worker_of(released, of_worker, log, "--step-ms=200"))
        old_gateway = start(processes.gateway(of_gateway, log, data, root=released))
        with httpx.Client(base_url=old_gateway.url, timeout=PATIENCE_S, verify=NO_TLS) as client:
            stored = client.post("/v1/responses", json=RESPONSE).json()
            with client.stream(
                "POST", "/v1/completions", json={**COMPLETION, "stream": True}
            ) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                new_worker = start(processes.echo_worker(of_worker, log))
                old_worker.terminate()
                taken_over = text_of(chain([first], lines))
        old_gateway.terminate()
        gateway = start(processes.gateway(of_gateway, log, data))
        with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, verify=NO_TLS) as client:
            found = client.get(f"/v1/responses/{stored['id']}").json()
            whole = client.post("/v1/completions", json=COMPLETION).json()
            new_worker.terminate()
            slow_worker = start(processes.echo_worker(of_worker, log, "--step-ms=200"))
            each = {**COMPLETION, "stream": True, "stream_options": {"each_token": True}}
            with client.stream("POST", "/v1/completions", json=each) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                start(processes.echo_worker_of(released, of_worker, log))
                slow_worker.terminate()
                taken_back = text_of(chain([first], lines))
            used = used_by(client, num_requests=4)

    assert taken_over == taken_back == whole["choices"][0]["text"]
    assert found["output"] == stored["output"]
    assert (used["completed"], used["takeovers"]) == (4, 2)
