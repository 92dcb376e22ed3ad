"""The command ``warren size``: the processes that a load takes."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cli.size.cache import StreamCache, stream_cache
from cli.size.costs import Costs
from cli.size.costs import load as load_costs
from cli.size.model import UTILIZATION, Load, Machines, Size, paced_tokens_per_event
from cli.size.model import size as computed
from cli.tables import Cell, Column, FittedTable, print_tables
from cli.terminal import number_of, print_json
from shared.errors import StartupError
from shared.host_memory import readable_size

_GIB = 1 << 30
_MIB = 1 << 20
_NEEDS = (
    Column("process"),
    Column("number", is_number=True),
    Column("cores, all", is_number=True),
    Column("memory of each", is_number=True, rank=1),
    Column("remark", rank=2),
)
_CACHE = (
    Column("of a stream"),
    Column("memory", is_number=True),
    Column("remark", rank=1),
)
_LIMITS = (
    Column("limit of one deployment"),
    Column("used", is_number=True),
    Column("streams at 100 %", is_number=True, rank=1),
    Column("what removes it", rank=2),
)


def size(
    streams: Annotated[
        float | None, typer.Option(min=1, help="Streams that are open at the same time.")
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(min=0, help="Requests per second. Unset: from the tokens.")
    ] = None,
    tokens_per_s: Annotated[
        float | None,
        typer.Option(min=0, help="Output tokens per second of all streams. Unset: from the rest."),
    ] = None,
    tokens_per_request: Annotated[
        float, typer.Option(min=1, help="Output tokens of an answer.")
    ] = 300,
    stream_tokens_per_s: Annotated[
        float, typer.Option(min=0.001, help="Output tokens per second of one stream.")
    ] = 20,
    tokens_per_event: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens in one event. Unset: as workers pace a stream."),
    ] = None,
    worker_tokens_per_s: Annotated[
        float, typer.Option(min=1, help="Output tokens per second of one worker, all streams.")
    ] = 1000,
    worker_streams: Annotated[
        float, typer.Option(min=1, help="Streams of one worker: its WARREN_MAX_NUM_SEQS.")
    ] = 64,
    model: Annotated[
        str | None,
        typer.Option(help="Compute the cache that its streams take: a name, directory or GGUF."),
    ] = None,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt and answer of a stream, with --model.")
    ] = 4096,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0, help="GiB of a worker's cache, with --model: limits its streams."),
    ] = None,
    gateway_streams: Annotated[
        float, typer.Option(min=1, help="Streams of one gateway: its WARREN_MAX_REQUESTS.")
    ] = 1024,
    cores: Annotated[float, typer.Option(min=1, help="Cores of a node of the broker.")] = 8,
    memory: Annotated[float, typer.Option(min=0.5, help="GiB of a node of the broker.")] = 16,
    core_speed: Annotated[
        float,
        typer.Option(min=0.25, help="Speed of a core, relative to the machine that was measured."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute how many gateways, broker nodes and workers a load takes.

    Give at least one of --streams, --requests-per-s and --tokens-per-s. What is not given follows
    from the length and the speed of an answer; what is given is not changed. The output says which
    costs are measured and which are estimated. Loads beyond the measured loads are
    extrapolated.

    warren size --streams 10000 --tokens-per-request 500 --worker-tokens-per-s 3000
    """
    if tokens_per_s is None:
        if requests_per_s is not None:
            tokens_per_s = requests_per_s * tokens_per_request
        elif streams is not None:
            tokens_per_s = streams * stream_tokens_per_s
        else:
            raise StartupError("give --streams, --requests-per-s or --tokens-per-s")
    load = Load(
        num_streams=tokens_per_s / stream_tokens_per_s if streams is None else streams,
        requests_per_s=tokens_per_s / tokens_per_request
        if requests_per_s is None
        else requests_per_s,
        tokens_per_s=tokens_per_s,
        tokens_per_event=paced_tokens_per_event(tokens_per_request, stream_tokens_per_s)
        if tokens_per_event is None
        else tokens_per_event,
    )
    cache = None
    if model is not None:
        cache_bytes = None if cache_memory is None else cache_memory * _GIB
        cache = stream_cache(model, context_tokens, cache_bytes)
        worker_streams = min(worker_streams, cache.num_streams or worker_streams)
    elif cache_memory is not None:
        raise StartupError("--cache-memory needs --model")
    machines = Machines(
        worker_tokens_per_s=worker_tokens_per_s,
        worker_streams=worker_streams,
        node_cores=cores,
        node_bytes=memory * _GIB,
        gateway_streams=gateway_streams,
        core_speed=core_speed,
    )
    costs = load_costs()
    found = computed(load, machines, costs)
    if as_json:
        about = {
            "measured": costs.about,
            "estimated": costs.estimated,
            "extrapolated": list(extrapolated(load, found, costs)),
        }
        of_cache = {} if cache is None else {"cache": asdict(cache)}
        print_json({"load": load, **asdict(found), **of_cache, **about})
    else:
        print_tables(render(load, found, costs, cache))


def extrapolated(load: Load, found: Size, costs: Costs) -> Iterator[str]:
    """The parts of a load that are larger than all that were measured, and the largest that were
    measured."""
    measured = costs.measured
    for name, value, largest in (
        ("workers", found.num_workers, measured.num_workers),
        ("streams", load.num_streams, measured.num_streams),
        ("requests/s", load.requests_per_s, measured.requests_per_s),
        ("events/s", load.events_per_s, measured.events_per_s),
    ):
        if value > largest:
            yield f"{name} beyond {largest:,.0f}"


def render(load: Load, found: Size, costs: Costs, cache: StreamCache | None) -> RenderableType:
    head = Text.assemble(
        ("Load ", "bold"),
        f"{load.num_streams:,.0f} streams, {load.requests_per_s:,.1f} requests/s, "
        f"{load.tokens_per_s:,.0f} tokens/s",
    )
    machine = costs.about["machine"]
    source = (
        f"Costs of {costs.about['date'][:10]}, measured on {machine['cores']} cores of "
        f"{machine['cpu']}; processes are loaded up to {UTILIZATION:.0%}."
    )
    beyond = ", ".join(extrapolated(load, found, costs))
    of_cache = (
        () if cache is None else (FittedTable("Cache of a worker", _CACHE, list(_cache(cache))),)
    )
    return Group(
        head,
        Text(),
        FittedTable("What it takes", _NEEDS, list(_needs(found, costs))),
        *of_cache,
        FittedTable("Limits, the next one first", _LIMITS, list(_limits(load, found))),
        Text(f"{source} {costs.estimated}".rstrip(), style="dim"),
        Text(
            f"Extrapolated: {beyond}."
            if beyond
            else "No part of it is larger than what was measured.",
            style="dim",
        ),
    )


def _needs(found: Size, costs: Costs) -> Iterator[tuple[Cell, ...]]:
    deployments = number_of(found.num_deployments, "deployment")
    yield (
        "gateway",
        f"{found.num_gateways:,}",
        f"{found.gateway_cores:,.1f}",
        f"{found.gateway_bytes / _MIB:,.0f} MiB",
        f"{found.num_connections:,} connections to the broker",
    )
    yield (
        "broker node",
        f"{found.num_nodes:,}",
        f"{found.broker_cores:,.1f}",
        f"{found.node_bytes / _MIB:,.0f} MiB",
        "three nodes survive the loss of one" if found.num_nodes == 1 else f"in {deployments}",
    )
    yield (
        "worker",
        f"{found.num_workers:,}",
        f"{found.worker_cores:,.1f}",
        f"{costs.process_bytes['worker'] / _MIB:,.0f} MiB",
        "one is spare; without the model's own CPU and memory",
    )


def _cache(cache: StreamCache) -> Iterator[tuple[Cell, ...]]:
    yield (
        "keys and values",
        readable_size(cache.token_bytes),
        f"of {cache.num_tokens:,} tokens",
    )
    yield "states", readable_size(cache.state_bytes), "the same for a stream of any length"
    number = "" if cache.num_streams is None else f"{cache.num_streams:,} streams fit"
    yield "together", readable_size(cache.stream_bytes), number


def _limits(load: Load, found: Size) -> Iterator[tuple[Cell, ...]]:
    for limit in found.limits:
        style = "yellow" if limit.used > UTILIZATION else "green"
        most = load.num_streams / limit.used / found.num_deployments if limit.used else None
        yield (
            limit.name,
            Text(f"{limit.used:.1%}", style=style),
            "-" if most is None else f"{most:,.0f}",
            limit.remedy,
        )
