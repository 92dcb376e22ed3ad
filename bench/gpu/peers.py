"""Peers, each in a process of its own, because it may fail, hang or keep the device's memory."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.requests import Request
from bench.gpu.scale import Scale, transformers_config
from bench.gpu.whole import Run

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
class Outcome:
    """The result of a peer: a run, or the reason why there is none."""

    peer: Peer
    run: Run | None
    reason: str = ""


def run_all(
    scale: Scale,
    requests: list[Request],
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
) -> Iterator[Outcome]:
    """Run the peers in turn, with the same requests."""
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
            yield Outcome(peer, None, "is not installed")
        else:
            yield _run(peer, task, timeout_s)


def _run(peer: Peer, task: dict[str, Any], timeout_s: float) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        path, answer = Path(directory, "task.json"), Path(directory, "answer.json")
        path.write_text(json.dumps(task))
        command = [sys.executable, "-m", peer.module, str(path), str(answer)]
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                timeout=timeout_s,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(peer, None, f"took longer than {timeout_s:.0f} s")
        if done.returncode or not answer.exists():
            *_, last = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            return Outcome(peer, None, last[:120])
        return Outcome(peer, Run(**json.loads(answer.read_text())))
