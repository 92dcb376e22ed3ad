"""The systems that are compared, and the commands that start them."""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.broker import BrokerNode, broker_node
from bench.load import MODEL
from tests.support.deployment.processes import free_port
from worker.checkpoints import store
from worker.checkpoints.gguf_file import read_header

Command = Sequence[str]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Room:
    """The number of users and tokens that a peer is configured for. Our systems need no such
    limit."""

    num_users: int
    max_len: int
    """Tokens of a prompt and its output together."""


@dataclass(frozen=True)
class System:
    """``commands`` returns the commands for a port and a broker URL. All of them run together, and
    a single command listens on the port."""

    name: str
    weights: str
    commands: Callable[[int, str], Sequence[Command]]
    options: Sequence[str] = ()
    """The options of our workers, in addition to those of the benchmark."""
    is_peer: bool = False
    broker: Callable[[], AbstractContextManager[BrokerNode]] | None = None
    """Provides the broker, if the system needs one."""
    program: str | None = None
    """The peer's executable, which prints its version."""
    environment: Mapping[str, str] = field(default_factory=dict)
    roles: Sequence[str] = ()
    """The names of the processes of the commands, if their CPU time is measured."""
    has_foreign_engine: bool = False
    """Whether a peer computes for our worker."""


def warren(
    weights: str, broker_url: str | None, options: Sequence[str] = (), gguf: Path | None = None
) -> System:
    """Gateway and worker as two processes, over the broker at a URL or a node of their own. They
    serve a GGUF file as it is, or `bench.load.MODEL`."""

    def commands(port: int, broker: str) -> list[Command]:
        common = (f"--broker={broker}", "--log-level=warning")
        return [
            [*_WARREN, "gateway", f"--port={port}", *common],
            [*_WARREN, "worker", *_worker_options(weights, gguf), *common, *options],
        ]

    broker = partial(broker_node, broker_url)
    return System("Warren", weights, commands, options, broker=broker, roles=_ROLES)


def warren_before(peer: System, broker_url: str | None) -> System:
    """Gateway and worker, whose engine is a peer that the worker starts."""

    def commands(port: int, broker: str) -> list[Command]:
        engine_port = free_port()
        (command,) = peer.commands(engine_port, "")
        common = (f"--broker={broker}", "--log-level=warning")
        engine = (
            f"--engine={peer.name.lower()}",
            f"--engine-url=http://127.0.0.1:{engine_port}",
            f"--engine-command={shlex.join(command)}",
        )
        return [
            [*_WARREN, "gateway", f"--port={port}", *common],
            [*_WARREN, "worker", f"--model={MODEL}", *engine, *common],
        ]

    return System(
        f"Warren + {peer.name}",
        peer.weights,
        commands,
        broker=partial(broker_node, broker_url),
        environment=peer.environment,
        roles=_ROLES,
        has_foreign_engine=True,
    )


def warren_serve(weights: str, options: Sequence[str] = (), gguf: Path | None = None) -> System:
    """The same in a single process, without a broker."""

    def commands(port: int, _: str) -> list[Command]:
        common = (f"--port={port}", "--log-level=warning")
        return [[*_WARREN, "serve", *_worker_options(weights, gguf), *common, *options]]

    return System("warren serve", weights, commands, options)


def llama_server(program: str, gguf: Path, needed: Room) -> System:
    """llama-server with a slot for each user; each slot has a cache of its own."""

    def commands(port: int, _: str) -> list[Command]:
        slots = needed.num_users
        room = ["--parallel", str(slots), "--ctx-size", str(slots * needed.max_len)]
        served = ["--model", str(gguf), "--alias", MODEL, "--port", str(port)]
        return [[program, *served, *room, "--no-webui"]]

    return System("llama-server", gguf_weights(gguf), commands, is_peer=True, program=program)


def vllm(program: str, dtype: str, needed: Room) -> System:
    """vLLM on the CPU, with its defaults except for the length of the context."""

    def commands(port: int, _: str) -> list[Command]:
        directory = str(store.resolve(MODEL))
        served = ["--served-model-name", MODEL, "--port", str(port), "--dtype", dtype]
        return [[program, "serve", directory, *served, "--max-model-len", str(needed.max_len)]]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
    return System("vLLM", dtype, commands, is_peer=True, program=program, environment=environment)


def gguf_weights(gguf: Path) -> str:
    """The weight format of a GGUF file, in the names of our formats."""
    from gguf import LlamaFileType

    declared = read_header(gguf).entries["general.file_type"]
    assert isinstance(declared, int)
    name = LlamaFileType(declared).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    return {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}.get(name, name)


def peers(
    llama: str | None,
    ggufs: Sequence[Path],
    vllm_program: str | None,
    dtypes: Sequence[str],
    *,
    needed: Room,
) -> Iterator[System]:
    """The peers whose executables are given or in PATH."""
    llama = llama or shutil.which("llama-server")
    vllm_program = vllm_program or shutil.which("vllm")
    if llama:
        yield from (llama_server(llama, gguf, needed) for gguf in ggufs)
    if vllm_program:
        yield from (vllm(vllm_program, dtype, needed) for dtype in dtypes)


_ROLES = ("gateway", "worker")
_WARREN = (sys.executable, str(Path(__file__).parents[1] / "warren.py"))


def _worker_options(weights: str, gguf: Path | None) -> list[str]:
    if gguf:
        return [f"--model={gguf}", f"--served-name={MODEL}"]
    chosen = f"--dtype={weights}" if weights in _DTYPES else f"--weight-format={weights}"
    return [f"--model={MODEL}", chosen]
