"""The options that benchmarks share, and the systems that they select."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from bench.interrupt import ends_on_sigterm
from bench.systems import (
    Room,
    System,
    gguf_weights,
    peers,
    warren,
    warren_before,
    warren_serve,
)

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"

Out: TypeAlias = Annotated[Path, typer.Option(help="Where the JSON file and the picture go.")]
Runs: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Runs over all systems; the table shows medians.")
]
Users: TypeAlias = Annotated[
    list[int], typer.Option(min=1, help="Concurrent users of one setting. Repeatable.")
]


def _bfloat16() -> list[str]:
    return ["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The values of the shared options."""

    formats: Annotated[
        list[str],
        typer.Option(
            "--format",
            default_factory=_bfloat16,
            help="Our weights: float32, bfloat16, q8_0, q4_0, q4_1. Repeatable.",
        ),
    ]
    llama_server: Annotated[
        str | None, typer.Option(help="llama.cpp's llama-server; none: the one in PATH.")
    ] = None
    llama_models: Annotated[
        list[Path] | None,
        typer.Option(
            "--llama-model",
            exists=True,
            help="A GGUF file for it, one for each format. Repeatable.",
        ),
    ] = None
    vllm: Annotated[
        str | None, typer.Option(help="vLLM's command vllm; none: the one in PATH.")
    ] = None
    vllm_dtypes: Annotated[
        list[str],
        typer.Option("--vllm-dtype", default_factory=_bfloat16, help="Its weights. Repeatable."),
    ]
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure this system alone, named as in the table. Repeatable."),
    ] = None
    broker: Annotated[
        str | None,
        typer.Option(envvar="WARREN_TEST_AMQP_URL", help="AMQP URL; default: a node of its own."),
    ] = None
    worker_options: Annotated[
        list[str] | None,
        typer.Option("--worker-option", help="Given to our workers, as --compute-threads=1."),
    ] = None
    out: Out = RESULTS

    def systems(
        self, needed: Room, bounds: Sequence[str] = (), *, has_engines: bool = False
    ) -> list[System]:
        """Our systems, once with each of ``bounds`` as an additional option, and then the peers,
        with ``has_engines`` each of them also as the engine of our worker. Raises
        `typer.BadParameter`."""
        given = self.worker_options or []
        own = [
            system
            for options in [[*given, bound] for bound in bounds] or [given]
            for system in ours(self.formats, self.broker, options)
        ]
        theirs = peers(
            self.llama_server, self.llama_models or (), self.vllm, self.vllm_dtypes, needed=needed
        )
        beside = [
            system
            for peer in theirs
            for system in (peer, *([warren_before(peer, self.broker)] if has_engines else []))
        ]
        return selected([*own, *beside], self.only)

    def systems_of_files(self, needed: Room, files: Sequence[Path]) -> list[System]:
        """Our systems and the peers that serve GGUF files, each with every file. Raises
        `typer.BadParameter`."""
        options = self.worker_options or ()
        own = [
            system
            for file in files
            for weights in [gguf_weights(file)]
            for system in (
                warren(weights, self.broker, options, file),
                warren_serve(weights, options, file),
            )
        ]
        theirs = peers(self.llama_server, files, None, (), needed=needed)
        return selected([*own, *theirs], self.only)


def comparison(main: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of ``main(choice, ...)`` and of `SharedOptions`."""
    _, *own = inspect.signature(main).parameters.values()
    shared = inspect.signature(SharedOptions).parameters

    @functools.wraps(main)
    def command(**given: Any) -> None:
        choice = SharedOptions(**{name: given.pop(name) for name in shared})
        ends_on_sigterm(main)(choice, **given)

    # typer reads the signature from here.
    vars(command)["__signature__"] = inspect.Signature([*own, *shared.values()])
    return command


def ours(
    formats: Sequence[str], broker: str | None, worker_options: Sequence[str] | None
) -> list[System]:
    """Both deployments, for each format."""
    options = worker_options or ()
    return [
        system
        for weights in formats
        for system in (warren(weights, broker, options), warren_serve(weights, options))
    ]


def selected(systems: Sequence[System], only: Sequence[str] | None) -> list[System]:
    """The systems with the given names; all if there are none. Raises `typer.BadParameter`."""
    names = {system.name for system in systems}
    if unknown := set(only or ()) - names:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(sorted(names))}")
    return [system for system in systems if not only or system.name in only]
