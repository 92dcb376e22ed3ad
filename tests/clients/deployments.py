"""Deployments of Warren, each with an API key and an allowed origin."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from gateway.intake.keys.key_file import KeyFile
from tests.clients.checks import Target
from tests.support.deployment import processes
from tests.support.deployment.broker import URL_VARIABLE, Broker, running_node
from tests.support.deployment.processes import WarrenProcess
from tests.support.engines.real_servers import RealEngine, write_unpacked
from worker.checkpoints import store

MODEL, EMBEDDER = "smollm2", "smollm2-embedder"
_ENGINE_SEQ_LEN = 8192
_POOLING = {
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
}


@contextmanager
def serve(directory: Path) -> Iterator[Target]:
    """Everything in a single process over the in-memory bus."""
    with ExitStack() as stack:
        key, port, options = _gateway(directory)
        process = processes.serve(directory / "serve.log", *_worker(directory), *options)
        yield _target(stack.enter_context(process), key, port)


@contextmanager
def rabbitmq(directory: Path) -> Iterator[Target]:
    """A gateway and two workers over RabbitMQ; the second worker serves embeddings."""
    with _over_rabbitmq(directory, lambda: _worker(directory)) as target:
        yield target


@contextmanager
def llama_server(directory: Path) -> Iterator[Target]:
    """The same; the engine of the first worker is the llama-server in PATH."""

    def options() -> list[str]:
        engine = RealEngine("llama-server", "llama-server", "llama-server")
        weights = _unpacked(directory / "unpacked")
        given = engine.options(weights, processes.free_port(), max_seq_len=_ENGINE_SEQ_LEN)
        named = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        return [f"--model={_smollm2()}", f"--served-name={MODEL}", *named]

    with _over_rabbitmq(directory, options) as target:
        yield target


DEPLOYMENTS: Mapping[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "serve": serve,
    "rabbitmq": rabbitmq,
    "llama-server": llama_server,
}
USUAL = ("serve", "rabbitmq")
"""The deployments that need no other server."""


@contextmanager
def _over_rabbitmq(directory: Path, worker_options: Callable[[], list[str]]) -> Iterator[Target]:
    with ExitStack() as stack:
        key, port, options = _gateway(directory)
        url = stack.enter_context(_broker()).url
        started = [
            processes.worker(url, directory / "worker.log", *worker_options()),
            processes.worker(url, directory / "embedder.log", *_embedder(directory)),
        ]
        for process in started:
            stack.enter_context(process)
        process = processes.gateway(url, directory / "gateway.log", *options)
        yield _target(stack.enter_context(process), key, port)


def _gateway(directory: Path) -> tuple[str, int, list[str]]:
    """Returns an API key, the port of the allowed origin, and the gateway options for both."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.log"):
        old.unlink()
    keys_file, port = directory / "keys", processes.free_port()
    keys_file.unlink(missing_ok=True)
    shutil.rmtree(data_dir := directory / "data", ignore_errors=True)
    key = KeyFile(keys_file).add("clients")
    return (
        key,
        port,
        [
            f"--keys-file={keys_file}",
            f"--cors-origins=http://127.0.0.1:{port}",
            f"--data-dir={data_dir}",
        ],
    )


def _target(process: WarrenProcess, key: str, port: int) -> Target:
    return Target(process.url, key, MODEL, str(_smollm2()), str(port))


def _smollm2() -> Path:
    return store.pull(MODEL, lambda stage, done, total: None)


def _worker(directory: Path) -> list[str]:
    return _model(directory / MODEL, {})


def _unpacked(directory: Path) -> Path:
    """A directory with SmolLM2's weights as float16 in a GGUF file."""
    (packed,) = _smollm2().glob("*.gguf")
    directory.mkdir(exist_ok=True)
    if not (written := directory / "smollm2-f16.gguf").exists():
        partial = directory / "partial"
        write_unpacked(packed, partial)
        partial.rename(written)
    return directory


def _embedder(directory: Path) -> list[str]:
    files = {name: json.dumps(content) for name, content in _POOLING.items()}
    return _model(directory / EMBEDDER, files)


def _model(directory: Path, files: Mapping[str, str]) -> list[str]:
    """SmolLM2's directory with other ``files``; returns the options of a worker that serves it."""
    directory.mkdir(exist_ok=True)
    for path in _smollm2().iterdir():
        link = directory / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content)
    return [f"--model={directory}", f"--served-name={directory.name}", "--dtype=float32"]


@contextmanager
def _broker() -> Iterator[Broker]:
    """The broker of the environment, or a new node."""
    if url := os.environ.get(URL_VARIABLE):
        yield Broker(url)
        return
    with running_node() as node:
        yield node
