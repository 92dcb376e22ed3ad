"""Peers, each in a process of its own, because it may fail, hang or keep the device's memory."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.requests import GpuRequest
from bench.gpu.scale import Scale, transformers_config
from bench.gpu.whole import WholeRun

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    module: str
    goal: float
    """The minimum ratio of our rate to the peer's."""


PEERS = (
    Peer("transformers' continuous batching", "transformers", "bench.gpu.peer_transformers", 3.0),
    Peer("vLLM", "vllm", "bench.gpu.peer_vllm", 1.0),
)


@dataclass(frozen=True)
class PeerOutcome:
    """The result of a peer: a run, or the reason why there is none."""

    peer: Peer
    run: WholeRun | None
    reason: str = ""


def run_all(
    scale: Scale,
    requests: list[GpuRequest],
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
    logs: Path,
) -> Iterator[PeerOutcome]:
    """Run the peers in turn, with the same requests. Their output is written to the directory
    ``logs``."""
    logs.mkdir(parents=True, exist_ok=True)
    task = {
        "model": transformers_config(scale),
        "requests": [dataclasses.asdict(request) for request in requests],
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": scale.max_num_seqs,
        "max_num_batched_tokens": scale.max_num_batched_tokens,
        "max_seq_len": scale.max_request_len,
    }
    for peer in PEERS:
        if importlib.util.find_spec(peer.package) is None:
            yield PeerOutcome(peer, None, "is not installed")
        else:
            yield _run(peer, task, timeout_s, logs / f"peer-{peer.package}.log")


def _run(peer: Peer, task: dict[str, Any], timeout_s: float, log: Path) -> PeerOutcome:
    with tempfile.TemporaryDirectory() as directory:
        path, answer = Path(directory, "task.json"), Path(directory, "answer.json")
        path.write_text(json.dumps(task))
        command = [sys.executable, "-m", peer.module, str(path), str(answer)]
        code = _exit_code(command, timeout_s, log)
        if code is None:
            return PeerOutcome(peer, None, f"took longer than {timeout_s:.0f} s: see {log.name}")
        if code or not answer.exists():
            *_, last = log.read_text().strip().splitlines() or [f"exit code {code}"]
            return PeerOutcome(peer, None, last[:120])
        return PeerOutcome(peer, WholeRun(**json.loads(answer.read_text())))


def _exit_code(command: list[str], timeout_s: float, log: Path) -> int | None:
    """Run a command; None if it did not end in time.

    Its process group is killed in any case, because a peer's engine may be a process of its own
    that would keep the device's memory.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
