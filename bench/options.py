"""Options that the comparing benchmarks share, and the systems that they choose."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from bench.systems import System, warren, warren_serve

RESULTS = Path(__file__).parent / "results"

Formats: TypeAlias = Annotated[
    list[str],
    typer.Option("--format", help="Our weights: float32, bfloat16, q8_0, q4_0, q4_1. Repeatable."),
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Measure this system alone, named as in the table. Repeatable."),
]
LlamaServer: TypeAlias = Annotated[
    str | None, typer.Option(help="llama.cpp's llama-server; none: the one in PATH.")
]
LlamaModels: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--llama-model", exists=True, help="A GGUF file for it, one for each format. Repeatable."
    ),
]
Vllm: TypeAlias = Annotated[
    str | None, typer.Option(help="vLLM's command vllm; none: the one in PATH.")
]
VllmDtypes: TypeAlias = Annotated[
    list[str], typer.Option("--vllm-dtype", help="Its weights. Repeatable.")
]
Broker: TypeAlias = Annotated[
    str | None,
    typer.Option(envvar="WARREN_TEST_AMQP_URL", help="AMQP URL; none: a node of its own."),
]
WorkerOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--worker-option", help="Given to our workers, as --compute-threads=1."),
]
Runs: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Runs over all systems; the table shows medians.")
]
Users: TypeAlias = Annotated[
    list[int], typer.Option(min=1, help="Concurrent users of one setting. Repeatable.")
]
Out: TypeAlias = Annotated[Path, typer.Option(help="Where the JSON file and the picture go.")]


def ours(
    formats: Sequence[str], broker: str | None, worker_options: Sequence[str] | None
) -> list[System]:
    """Both deployments for each format."""
    options = worker_options or ()
    return [
        system
        for weights in formats
        for system in (warren(weights, broker, options), warren_serve(weights, options))
    ]


def selected(systems: Sequence[System], only: Sequence[str] | None) -> list[System]:
    """Those of ``systems`` that were asked for. Raises `typer.BadParameter`."""
    names = {system.name for system in systems}
    if unknown := set(only or ()) - names:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(sorted(names))}")
    return [system for system in systems if not only or system.name in only]
